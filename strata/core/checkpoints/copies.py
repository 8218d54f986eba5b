"""Copying a checkpoint to a further tier (PROTOCOLS 8.7).

For each rank's part, this rank or another one reports the copy with the digest that was acked. One rank also
reports the manifest and the marker: this report is the copy's seal. Once every part and the seal are reported, the
tier enters the record and may be read. A removed tier never comes back, because its objects may still be in
deletion. Nor is an Incremental copied to a tier that removes the Incremental's base, or on which the base is
damaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from strata.core.checkpoints.attempt import bases, named
from strata.core.checkpoints.paths import attempt_path, check_root
from strata.core.checkpoints.references import Copy
from strata.core.checkpoints.tiers import BEGUN, tiers_of
from strata.core.ids import checked_id
from strata.core.job import JobView
from strata.core.kv.records import Ack, CheckpointRecord, CheckpointState, Seal, Tier, TierState, encode
from strata.core.kv.txn import Decision, Put, Txn, absent, present, refusable, unchanged
from strata.core.kv.view import Entry
from strata.errors import CheckpointError, Conflict, Refused

_COPIED = frozenset({CheckpointState.OPEN, CheckpointState.COMMITTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRequest:
    """The report that a rank's part (or, with `rank` None, the manifest and the marker) is on `tier`, below `root`.

    `begun`: the copy only starts. If the copying process then crashes, a deletion of the record also removes the
    bytes of this copy.
    """

    step: int
    attempt: str
    tier: str
    root: str
    shared: bool = True
    rank: int | None = None
    digest: str = ""
    host: str = ""
    begun: bool = False


@refusable
def decide_report_copy(job: JobView, request: CopyRequest) -> Decision:
    """Record that a part is copied, once; the last part adds the tier to the record.

    The digest must be the acked one. An adopted checkpoint has no acks, and only its manifest's digest is known:
    for its parts, the first digest reported counts. `Conflict`: the digest differs. `Refused`: the tier or the
    checkpoint is in deletion, which also removes the copied bytes. `CheckpointError`: the tier has lost bytes of a
    base that the checkpoint needs.
    """
    held = named(job, request.step, request.attempt)
    record, name = held.record, checked_id("tier", request.tier)
    if record.state not in _COPIED:
        raise Refused(f"step {record.step} is {record.state.value}, and is not copied any more")
    known = tiers_of(record).get(name)
    if known is not None and known.state is TierState.PRESENT:
        return Decision(reason=f"step {record.step} is on {name}")
    if known is not None:
        raise Refused(f"step {record.step} on {name} is {known.state.value}")
    if (lost := _lost_base(job, record, name)) is not None:
        raise lost
    key = (
        job.keys.copied_seal(*record.where, name)
        if request.rank is None
        else job.keys.copy(*record.where, name, request.rank)
    )
    if request.begun:
        key = job.keys.copies(*record.where, name) + BEGUN
    elif (expected := _digest_of(job, record, request)) != request.digest or not expected:
        there, acked = request.digest or "none", expected or "none"
        raise Conflict(f"the bytes on {name} have digest {there}, and {acked} was acked")
    if (copied := job.view.record(key, Copy)) is not None:
        if not request.begun and copied.digest != request.digest:
            differing = f"has digest {copied.digest}, and {request.digest} is reported"
            raise Conflict(f"the part on {name} {differing}")
        return decide_tier(job, held, name)
    check_root(request.root)
    copy = Copy(
        digest=request.digest,
        path=attempt_path(request.root, job.keys.name, *record.where),
        shared=request.shared,
        host=request.host,
    )
    what = (
        "begins" if request.begun else "has the seal" if request.rank is None else f"has rank {request.rank}"
    )
    return Decision(
        reason=f"{name} {what} of step {record.step}",
        txn=Txn(
            compares=(unchanged(held.key, held.mod_revision), absent(key)),
            success=(
                Put(key=key, value=encode(copy)),
                *(_begun_beside(job, record, request) if request.begun else ()),
            ),
        ),
    )


def _digest_of(job: JobView, record: CheckpointRecord, request: CopyRequest) -> str:
    """Return the digest that the copy must have; "" if it is unknown or there is no such part."""
    rank = request.rank
    # a commit needs acks: a COMMITTED record without acks was aborted first and adopted later
    adopted = record.state is CheckpointState.COMMITTED and record.origin is None
    if rank is None:
        seal = job.view.record(job.keys.seal(*record.where), Seal)
        return seal.digest if seal is not None else record.manifest_digest if adopted else ""
    ack = job.view.record(job.keys.ack(*record.where, rank), Ack)
    if ack is not None:
        return ack.digest
    # the seal of the copy must match the manifest, which names the parts
    return request.digest if adopted and rank < record.ranks else ""


def _lost_base(job: JobView, record: CheckpointRecord, name: str) -> CheckpointError | None:
    """Return an error if the tier has lost bytes of a base for good, so that no copy on it could be read; else None.

    The error is not `Refused`: to the waiting caller, `Refused` would mean that the copy is no longer needed, but
    the caller must learn of the loss. A base that was never copied to the tier is no obstacle: its images are
    copied along. No write needs to compare these facts, because a base is removed from no tier while `record`
    refers to the base.
    """
    for base in (entry.record for entry in bases(job, record)):
        if name in base.tiers and base.tiers[name].state is not TierState.PRESENT:
            state = base.tiers[name].state.value
            why = f"step {base.step}, which step {record.step} needs, is {state} on {name}"
            return CheckpointError(why, hint="save a Full")
    return None


def _begun_beside(job: JobView, record: CheckpointRecord, request: CopyRequest) -> Iterator[Put]:
    """Yield the notes that make the deletion of a base also remove its images that this copy brings to the tier.

    A base that was saved before the tier existed has no copy on the tier that would name these bytes.
    """
    for base in (entry.record for entry in bases(job, record)):
        key = job.keys.copies(*base.where, request.tier) + BEGUN
        if base.origin is None and request.tier not in tiers_of(base) and job.view.get(key) is None:
            path = attempt_path(request.root, job.keys.name, *base.where)
            yield Put(key=key, value=encode(Copy(digest="", path=path, shared=request.shared)))


def decide_tier(job: JobView, held: Entry[CheckpointRecord], name: str) -> Decision:
    """Add a tier to a committed record once every part and the seal are reported.

    Reports of copies stay as long as the record. So "every part is reported" needs only two compares: of the
    record, and of the copy's seal, which a deletion of the copy removes.
    """
    record = held.record
    if name in tiers_of(record) or record.state is not CheckpointState.COMMITTED:
        return Decision(reason=f"step {record.step} is {record.state.value}: it needs no more parts")
    key = job.keys.copied_seal(*record.where, name)
    seal = job.view.record(key, Copy)
    there = set(job.view.names(job.keys.copies(*record.where, name))) - {"seal", BEGUN}
    if seal is None or len(there) < record.ranks:
        return Decision(reason=f"{name} has {len(there)} of {record.ranks} parts of step {record.step}")
    if (lost := _lost_base(job, record, name)) is not None:
        return Decision(reason=lost.message)
    tiers = {**tiers_of(record), name: Tier(path=seal.path, shared=seal.shared)}
    return Decision(
        reason=f"step {record.step} is on {name}",
        txn=Txn(
            compares=(unchanged(held.key, held.mod_revision), present(key)),
            success=(Put(key=held.key, value=encode(dataclasses.replace(record, tiers=tiers))),),
        ),
    )


def next_tier(job: JobView) -> Decision:
    """Decide the first tier of this job that is complete but in no record; any replica may call it at any time."""
    for entry in job.checkpoints():
        record = entry.record
        if record.state is not CheckpointState.COMMITTED:
            continue
        copies = f"{job.keys.attempt(*record.where)}copies/"
        for name in job.view.names(copies):
            decision = decide_tier(job, entry, name)
            if decision.txn is not None:
                return decision
    return Decision(reason="all complete copies are recorded")
