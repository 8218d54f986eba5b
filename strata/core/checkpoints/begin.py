"""Opening the slot of a checkpoint, or joining the attempt that holds it (PROTOCOLS 8.1, 8.5)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from strata.core.checkpoints.attempt import MAX_REFERENCES, Author, authorised, uses
from strata.core.checkpoints.corruption import reported_tiers
from strata.core.checkpoints.order import find, pending_rewind
from strata.core.checkpoints.paths import attempt_path, check_root
from strata.core.checkpoints.references import Discarded, Reference
from strata.core.checkpoints.tiers import PRIMARY, present_on, tiers_of
from strata.core.ids import AttemptId, checked_id
from strata.core.job import JobView
from strata.core.kv.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    Tier,
    TierState,
    encode,
)
from strata.core.kv.txn import Decision, Operation, Put, Txn, delete_prefix, refusable, unchanged
from strata.core.kv.view import Entry
from strata.errors import (
    CheckpointNotFound,
    InvalidArgument,
    QuotaExceeded,
    Refused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRequest:
    """Open the slot (step, the author's generation), or join the attempt that holds it.

    `replaces` names the ABORTED attempt whose slot the request may reuse. A late rank does not set `replaces`: the
    late rank must learn that its save was aborted. Otherwise it would open an attempt that no other rank joins.
    `tier` is the name of the tier of `root`; `shared`: whether that tier survives the loss of a host.
    """

    author: Author
    step: int
    type: CheckpointType
    root: str
    attempt: AttemptId
    epoch: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    base_step: int | None = None
    base_attempt: AttemptId | None = None
    replaces: str = ""
    tier: str = PRIMARY
    shared: bool = True


@refusable
def decide_begin(job: JobView, request: BeginRequest, *, now_unix_ms: int) -> Decision:
    """Open the slot, or find the attempt that holds it; the view then shows the record.

    Settled once the slot has an OPEN or COMMITTED record, or an ABORTED one that the request does not replace. The
    caller must check the record's `attempt` and `state`.
    """
    guards = authorised(job, request.author)
    author, step = request.author, request.step
    if step < 0:
        raise InvalidArgument(f"step {step} is below 0")
    checked_id("attempt", request.attempt)
    checked_id("tier", request.tier)
    check_root(request.root)
    key = job.keys.checkpoint(step, author.generation)
    held = job.checkpoint(step, author.generation)
    if held is not None and not _replaceable(held.record, request):
        return _joined(held.record)
    rewind = pending_rewind(job)
    if rewind is not None:
        raise Refused(
            f"the job goes back to step {rewind.record.step}: nothing is saved before that",
            hint="the next generation begins there",
        )
    latest = job.latest()
    # the step is before this generation's newest one: a rank went back without a new world
    if latest is not None and latest.record.generation == author.generation and step < latest.record.step:
        raise Refused(
            f"step {step} lies before step {latest.record.step}, which generation"
            f" {author.generation} has reached",
            hint="going back takes a new generation that restores from the older step",
        )
    bases = _bases(job, request)
    head = job.head()
    assert head is not None  # `authorised` ensures it
    path = attempt_path(request.root, job.keys.name, step, author.generation, request.attempt)
    record = CheckpointRecord(
        attempt=request.attempt,
        step=step,
        generation=author.generation,
        type=request.type,
        state=CheckpointState.OPEN,
        ranks=head.record.size,
        path=path,
        epoch=request.epoch,
        created_unix_ms=now_unix_ms,
        base_step=request.base_step,
        base_attempt=request.base_attempt,
        metadata=dict(request.metadata),
        tiers={request.tier: Tier(path=path, shared=request.shared)},
    )
    operations: list[Operation] = [Put(key=key, value=encode(record)), *references(job, record, bases)]
    if held is not None:
        operations += _discard(job, held.record)
    return Decision(
        reason=f"rank {author.rank} opens step {step} as attempt {request.attempt}",
        txn=Txn(
            compares=(
                *guards,
                unchanged(key, job.view.mod_revision(key)),
                unchanged(job.keys.latest, job.view.mod_revision(job.keys.latest)),
                unchanged(job.keys.rewind, job.view.mod_revision(job.keys.rewind)),
                *(unchanged(b.key, b.mod_revision) for b in bases),
            ),
            success=tuple(operations),
        ),
    )


def references(
    job: JobView, user: CheckpointRecord, bases: Sequence[Entry[CheckpointRecord]]
) -> list[Operation]:
    """Return the puts of references that keep `bases` while `user` exists."""
    reference = encode(Reference(step=user.step, generation=user.generation))
    return [
        Put(
            key=job.keys.refs(*b.record.where) + user.attempt,
            value=reference,
        )
        for b in bases
    ]


def _discard(job: JobView, record: CheckpointRecord) -> list[Operation]:
    """Delete an ABORTED attempt's keys, and leave a note for the hosts that must remove its bytes."""
    note = Discarded(step=record.step, generation=record.generation, tiers=tiers_of(record))
    return [
        delete_prefix(job.keys.attempt(*record.where)),
        Put(key=job.keys.discard(record.attempt), value=encode(note)),
    ]


def _replaceable(record: CheckpointRecord, request: BeginRequest) -> bool:
    return (
        record.state is CheckpointState.ABORTED
        and record.attempt == request.replaces
        and record.attempt != request.attempt
    )


def _joined(record: CheckpointRecord) -> Decision:
    if record.state is CheckpointState.DELETING:
        raise Refused(
            f"step {record.step} of generation {record.generation} is being deleted",
            hint="save it again once the deletion is finished",
        )
    return Decision(reason=f"step {record.step} is attempt {record.attempt}, {record.state.value}")


def _bases(job: JobView, request: BeginRequest) -> list[Entry[CheckpointRecord]]:
    """Return every record whose chunks the new attempt may use; only an Incremental may use any."""
    if request.type is not CheckpointType.INCREMENTAL:
        return []
    if request.base_step is None or request.base_attempt is None:
        raise InvalidArgument("an Incremental names the step and the attempt it builds on")
    bases = bases_of(job, request.base_step, request.base_attempt, {request.tier})
    for entry in bases:
        for name in reported_tiers(job, entry.record):
            raise Refused(
                f"step {entry.record.step}, which the base needs, was found damaged on {name}",
                hint="save a Full",
            )
        for name, tier in tiers_of(entry.record).items():
            if tier.state is not TierState.PRESENT:  # the new attempt could not be copied to that tier either
                raise Refused(
                    f"step {entry.record.step}, which the base needs, is {tier.state.value} on {name}",
                    hint="save a Full",
                )
    return bases


def bases_of(job: JobView, step: int, attempt: str, tiers: Collection[str]) -> list[Entry[CheckpointRecord]]:
    """Return a base and every record that it uses, or raise if an Incremental on `tiers` may not refer to all of them.

    An Incremental's chunks refer to those of its bases, so each base must be on every tier that is written. The
    begin's transaction compares that the bases' records are unchanged. The transaction that turns a record or one
    of its tiers into a tombstone changes the record too, and compares that no reference exists. So only the first
    of the two transactions succeeds.
    """
    base = find(job, step, attempt)
    if base is None:
        raise CheckpointNotFound(f"no attempt {attempt} of step {step} to build on")
    bases = [base, *(e for e in job.checkpoints() if uses(job, base.record, e.record))]
    if len(bases) > MAX_REFERENCES:
        raise QuotaExceeded(f"the base uses {len(bases) - 1} earlier checkpoints already", hint="save a Full")
    for entry in bases:
        if entry.record.state is not CheckpointState.COMMITTED:
            raise Refused(
                f"step {entry.record.step}, which the base needs, is {entry.record.state.value}",
                hint="build on a committed checkpoint, or save a Full",
            )
        if lacking := sorted(set(tiers) - set(present_on(entry.record))):
            raise Refused(
                f"step {entry.record.step}, which the base needs, is not on {lacking[0]} any more",
                hint="save a Full",
            )
    return bases
