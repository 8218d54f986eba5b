"""Maintenance tasks on the bytes of checkpoints, for hosts that can reach them (PROTOCOLS 8.6, 8.8).

Coordinators never read or write storage. Coordinators list the tasks that are due, and the client library runs the
tasks on a host that can reach the bytes. Tasks are neither assigned exclusively nor locked: each task is correct
however often and however late it runs. The reason is that the folder of an attempt is never reused, and its removal
is recorded.

An absent record is never a reason to remove bytes. The bytes of an attempt whose slot another attempt
took are listed under `discarded/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from strata.core.checkpoints.attempt import named
from strata.core.checkpoints.begin import bases_of, references
from strata.core.checkpoints.corruption import object_to_verify
from strata.core.checkpoints.deletion import dying_tiers
from strata.core.checkpoints.order import RESTORABLE_TYPES, counts, order
from strata.core.checkpoints.references import Discarded
from strata.core.checkpoints.tiers import hosts_of, present_on, tiers_of
from strata.core.ids import AttemptId
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, Tier, encode
from strata.core.kv.txn import Decision, Put, Txn, refusable, unchanged
from strata.core.kv.view import Entry
from strata.errors import InvalidArgument, Refused


class MaintenanceKind(Enum):
    """REMOVE a tombstone's bytes; CLEAR an aborted save, unless storage has its marker; VERIFY a copy."""

    REMOVE = "remove"
    CLEAR = "clear"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceTask:
    """One task on one copy of one attempt."""

    kind: MaintenanceKind
    step: int
    generation: int
    attempt: AttemptId
    tier: str
    path: str
    manifest_digest: str = ""
    object: str = ""


def tasks(job: JobView, host: str) -> Iterator[MaintenanceTask]:
    """Yield the tasks that are due and within reach of `host`: on shared tiers, and on its own disk."""
    newest = max(
        (
            counts(job, e.record)
            for e in job.checkpoints()
            if e.record.state is CheckpointState.COMMITTED and e.record.type in RESTORABLE_TYPES
        ),
        default=(0, 0),
    )
    for entry in job.checkpoints():
        record = entry.record
        if record.state is CheckpointState.COMMITTED:
            yield from _to_verify(job, record, host)
        if record.origin is not None:
            continue  # another job owns and removes the bytes of a fork; a rank of this job may still find them damaged
        if record.state is CheckpointState.ABORTED and order(record) < newest:
            yield from _each(job, record, tiers_of(record), MaintenanceKind.CLEAR, host)
        elif record.state in {CheckpointState.DELETING, CheckpointState.COMMITTED}:
            yield from _each(job, record, dying_tiers(record), MaintenanceKind.REMOVE, host)
    for note in job.view.entries(job.keys.discarded, Discarded):
        for name, tier in note.record.tiers.items():
            yield MaintenanceTask(
                kind=MaintenanceKind.CLEAR,
                step=note.record.step,
                generation=note.record.generation,
                attempt=AttemptId(note.name),
                tier=name,
                path=tier.path,
            )


def _each(
    job: JobView, record: CheckpointRecord, tiers: Iterable[str], kind: MaintenanceKind, host: str
) -> Iterator[MaintenanceTask]:
    """Yield the tasks for the copies on `tiers` that `host` can reach and has not removed."""
    for name in tiers:
        tier = tiers_of(record)[name]
        done = job.view.names(job.keys.removed(*record.where, name))
        if _reaches(job, record, name, tier, host) and host not in done:
            yield _task(kind, record, name, tier)


def _to_verify(job: JobView, record: CheckpointRecord, host: str) -> Iterator[MaintenanceTask]:
    """Yield a task for each copy that another host reported as damaged and that `host` has not verified yet."""
    for name in present_on(record):
        tier = tiers_of(record)[name]
        damaged = object_to_verify(job, record, name, host) if tier.shared and host else None
        if damaged is not None:
            yield dataclasses.replace(_task(MaintenanceKind.VERIFY, record, name, tier), object=damaged)


def _reaches(job: JobView, record: CheckpointRecord, name: str, tier: Tier, host: str) -> bool:
    """Return whether `host` can reach the tier; every host reaches a non-shared tier of which no part is recorded.

    A removal by a host without a part of the tier does nothing.
    """
    if tier.shared:
        return True
    hosts = hosts_of(job, record, name)
    return host in hosts or not hosts


def _task(kind: MaintenanceKind, record: CheckpointRecord, name: str, tier: Tier) -> MaintenanceTask:
    return MaintenanceTask(
        kind=kind,
        step=record.step,
        generation=record.generation,
        attempt=record.attempt,
        tier=name,
        path=tier.path,
        manifest_digest=record.manifest_digest,
    )


# -- adoption: a commit in storage that the catalog does not have -----------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRequest:
    """The report that storage has the marker of this attempt, its manifests and every image."""

    step: int
    attempt: str
    manifest_digest: str
    size_bytes: int
    model_hash: str = ""


@refusable
def decide_adopt(job: JobView, request: AdoptRequest) -> Decision:
    """Adopt into the catalog a save that is ABORTED in the catalog but committed in storage.

    This happens only after a restore from a backup, when the keyspace is older than the storage. The record becomes
    COMMITTED but does not move `latest`, because the running world began from another checkpoint. An Incremental
    gets new references to its bases, as at its begin. The adoption is refused if a base is in deletion or not in
    the catalog. If the base is adopted later, the next pass adopts the Incremental.
    """
    held = named(job, request.step, request.attempt)
    record = held.record
    if record.state is CheckpointState.COMMITTED and record.manifest_digest == request.manifest_digest:
        return Decision(reason=f"step {record.step} is committed")
    if record.state is not CheckpointState.ABORTED:
        raise Refused(
            f"step {record.step} is {record.state.value}, and only one that was given up can be adopted"
        )
    if not request.manifest_digest:
        raise InvalidArgument("an adoption names the digest of the manifest that the marker names")
    adopted = dataclasses.replace(
        record,
        state=CheckpointState.COMMITTED,
        manifest_digest=request.manifest_digest,
        size_bytes=request.size_bytes,
        model_hash=request.model_hash,
        reason=f"adopted: {record.reason}",
    )
    bases: list[Entry[CheckpointRecord]] = []
    if record.base_step is not None and record.base_attempt is not None:
        bases = bases_of(job, record.base_step, record.base_attempt, present_on(record))
    return Decision(
        reason=f"step {record.step} was committed in storage: it is adopted",
        txn=Txn(
            compares=(
                unchanged(held.key, held.mod_revision),
                *(unchanged(base.key, base.mod_revision) for base in bases),
            ),
            success=(Put(key=held.key, value=encode(adopted)), *references(job, adopted, bases)),
        ),
    )
