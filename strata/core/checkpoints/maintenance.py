"""What is to be done with the bytes of checkpoints, by those who can reach them (PROTOCOLS 8.6, 8.8).

Coordinators never touch storage. They say what is due, and the library does it, on a host that has the
bytes. Nothing is handed out twice on purpose and nothing is locked: each chore is right however often and
however late it is done, for the attempt's folder is never used again and its end is on record.

A record that is absent is never a reason to remove anything. What an attempt leaves whose slot another
one took is under `discarded/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from strata.core.checkpoints.attempt import named
from strata.core.checkpoints.begin import bases_of, references
from strata.core.checkpoints.corruption import to_look_at
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
    """REMOVE a tombstone's bytes; CLEAR a save that was given up, unless storage has its marker; VERIFY a copy."""

    REMOVE = "remove"
    CLEAR = "clear"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceTask:
    """One piece of work on one copy of one attempt."""

    kind: MaintenanceKind
    step: int
    generation: int
    attempt: AttemptId
    tier: str
    path: str
    manifest_digest: str = ""
    object: str = ""


def tasks(job: JobView, host: str) -> Iterator[MaintenanceTask]:
    """Yield what is due and within reach of `host`: on shared tiers, and on its own disk."""
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
            continue  # its bytes are another job's, to remove; a rank of this one may find them damaged
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
    """Yield the work on those of these copies that `host` reaches and has not removed."""
    for name in tiers:
        tier = tiers_of(record)[name]
        done = job.view.names(job.keys.removed(*record.where, name))
        if _reaches(job, record, name, tier, host) and host not in done:
            yield _task(kind, record, name, tier)


def _to_verify(job: JobView, record: CheckpointRecord, host: str) -> Iterator[MaintenanceTask]:
    """Yield the copies that another host found damaged where this one has not looked: once for each host."""
    for name in present_on(record):
        tier = tiers_of(record)[name]
        damaged = to_look_at(job, record, name, host) if tier.shared and host else None
        if damaged is not None:
            yield dataclasses.replace(_task(MaintenanceKind.VERIFY, record, name, tier), object=damaged)


def _reaches(job: JobView, record: CheckpointRecord, name: str, tier: Tier, host: str) -> bool:
    """A tier of hosts' disks without any part on record is everybody's: who has nothing removes nothing."""
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


# -- a commit that the catalog has forgotten --------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRequest:
    """Storage has the marker of this attempt, its manifests and every image."""

    step: int
    attempt: str
    manifest_digest: str
    size_bytes: int
    model_hash: str = ""


@refusable
def decide_adopt(job: JobView, request: AdoptRequest) -> Decision:
    """Take a save that was given up here, and is committed in storage, back into the catalog.

    That comes about only where the keyspace is older than the storage, restored from a backup. It is
    COMMITTED then, and moves no `latest`: the world that is running has begun elsewhere. An Incremental
    refers to its bases anew, as at its begin: it is refused once one of them is going, or not there
    yet (it is adopted itself, perhaps, and then this one with the next pass).
    """
    held = named(job, request.step, request.attempt)
    record = held.record
    if record.state is CheckpointState.COMMITTED and record.manifest_digest == request.manifest_digest:
        return Decision(reason=f"step {record.step} is committed")
    if record.state is not CheckpointState.ABORTED:
        raise Refused(f"step {record.step} is {record.state.value}, and only one given up is adopted")
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
