"""The life of a checkpoint in the catalog: begin, ack, seal, commit or abort (PROTOCOLS 8).

    begin ──▶ OPEN ──(every rank acked, sealed)──▶ COMMITTED ──▶ DELETING ──▶ removed
                └──(abort, or a second digest)──▶ ABORTED ──▶ replaced, or DELETING

One slot exists per (step, generation). Its record names one *attempt*; ranks that begin the same
slot join it. The key of an ack is below the attempt, is created only once, and stays while the record is OPEN. So
"all ranks acked" is a stable predicate: only a change of the record makes it false, and a commit compares the
record. A commit therefore needs no compare per rank, however large the world.

Every decision is level-triggered: it recognises its own effect, and the caller reads the result from the
view afterwards. A refusal is valid only if the view is at least as new as a linearizable read that began after the
request arrived; `Executor.settle` ensures this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from strata.core.checkpoints.attempt import (
    Author,
    abort_attempt,
    acked,
    attempt_of,
    authorised,
    complete,
    missing,
    sealed,
)
from strata.core.checkpoints.begin import BeginRequest, decide_begin
from strata.core.checkpoints.deletion import decide_delete
from strata.core.checkpoints.order import (
    RESTORABLE_TYPES,
    counts,
    find,
    is_latest,
    latest_under,
    newest,
    order,
    restore_point,
    superseded,
    supersedes_any,
)
from strata.core.checkpoints.paths import folder_name
from strata.core.checkpoints.pins import decide_pin, decide_unpin
from strata.core.checkpoints.references import Reference
from strata.core.job import JobView
from strata.core.kv.records import (
    Ack,
    CheckpointRecord,
    CheckpointState,
    Latest,
    Seal,
    encode,
)
from strata.core.kv.txn import (
    Decision,
    Operation,
    Put,
    Txn,
    absent,
    none_newer_in,
    refusable,
    unchanged,
)
from strata.core.kv.view import Entry
from strata.errors import (
    CheckpointAborted,
    Conflict,
    Refused,
    StrataError,
)

__all__ = [
    "COMPARE_BARRIER",
    "RESTORABLE_TYPES",
    "AckRequest",
    "Author",
    "BeginRequest",
    "Reference",
    "SealRequest",
    "acked",
    "complete",
    "counts",
    "decide_abort",
    "decide_ack",
    "decide_begin",
    "decide_close",
    "decide_commit",
    "decide_delete",
    "decide_pin",
    "decide_seal",
    "decide_unpin",
    "find",
    "folder_name",
    "is_latest",
    "latest_under",
    "missing",
    "newest",
    "order",
    "restore_point",
    "sealed",
    "superseded",
    "supersedes_any",
]

COMPARE_BARRIER: Final = "strata.checkpoint.compare"
"""The barrier at which the ranks of a save compare their tensors, in the background of their training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AckRequest:
    """The report that one rank's part is durable; `digest` is the digest of the part's manifest."""

    author: Author
    step: int
    attempt: str
    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRequest:
    """The report that the global manifest is durable; `size_bytes` is the sum of all images.

    `part_digests`: the digests of the rank manifests that the global manifest names, in rank order; empty: not
    sent.
    """

    author: Author
    step: int
    attempt: str
    digest: str
    size_bytes: int
    model_hash: str = ""
    part_digests: tuple[str, ...] = ()


# -- acks and the seal ------------------------------------------------------------------------


@refusable
def decide_ack(job: JobView, request: AckRequest) -> Decision:
    """Record that one rank's part is durable, once; a second, different digest aborts the attempt."""
    author = request.author
    held = attempt_of(job, author.generation, request.step, request.attempt)
    key = job.keys.ack(request.step, author.generation, request.attempt, author.rank)
    ack = job.view.record(key, Ack)
    if ack is not None and ack.digest == request.digest:
        return Decision(reason=f"rank {author.rank} acked step {request.step}")
    who = f"rank {author.rank}"
    if held.record.state is not CheckpointState.OPEN:
        raise _ended(held.record, who)
    guards = authorised(job, author)
    if ack is not None:
        return abort_attempt(job, held, f"{who} acked two different digests", guards)
    worker = job.worker(author.worker)
    record = Ack(
        digest=request.digest,
        size_bytes=request.size_bytes,
        worker=author.worker,
        incarnation=author.incarnation,
        host=worker.record.host if worker is not None else "",
    )
    return Decision(
        reason=f"{who} acks step {request.step}",
        txn=Txn(
            compares=(*guards, unchanged(held.key, held.mod_revision), absent(key)),
            success=(Put(key=key, value=encode(record)),),
        ),
    )


@refusable
def decide_seal(job: JobView, request: SealRequest) -> Decision:
    """Record that the global manifest is durable, once, and only after every rank's ack.

    `Conflict` if the manifest names another digest than a rank acked: then it was not composed of the parts that
    the ranks wrote.
    """
    author = request.author
    held = attempt_of(job, author.generation, request.step, request.attempt)
    seal = sealed(job, held.record)
    if seal is not None and seal.digest == request.digest:
        return Decision(reason=f"step {request.step} is sealed")
    who = f"rank {author.rank} as sealer"
    if held.record.state is not CheckpointState.OPEN:
        raise _ended(held.record, who)
    guards = authorised(job, author)
    if seal is not None:
        return abort_attempt(job, held, f"step {request.step} was sealed with two digests", guards)
    waiting = missing(job, held.record)
    if waiting:
        raise Refused(
            f"step {request.step} cannot be sealed: {len(waiting)} of {held.record.ranks}"
            f" ranks have not acked, the first is rank {waiting[0]}"
        )
    if request.part_digests and (complaint := _differing(job, held.record, request.part_digests)):
        raise Conflict(f"step {request.step} cannot be sealed: {complaint}")
    key = job.keys.seal(request.step, author.generation, request.attempt)
    record = Seal(
        digest=request.digest,
        size_bytes=request.size_bytes,
        worker=author.worker,
        incarnation=author.incarnation,
        model_hash=request.model_hash,
    )
    return Decision(
        reason=f"rank {author.rank} seals step {request.step}",
        txn=Txn(
            compares=(*guards, unchanged(held.key, held.mod_revision), absent(key)),
            success=(Put(key=key, value=encode(record)),),
        ),
    )


def _differing(job: JobView, record: CheckpointRecord, digests: Sequence[str]) -> str:
    """Return which of the manifest's parts differs from its rank's ack, as a sentence; "" if none does."""
    if len(digests) != record.ranks:
        return f"its manifest names {len(digests)} parts, and {record.ranks} ranks save"
    for rank, digest in enumerate(digests):
        ack = job.view.record(job.keys.ack(*record.where, rank), Ack)
        if ack is not None and ack.digest != digest:
            return f"rank {rank} acked {ack.digest}, and its manifest names {digest}"
    return ""


def _ended(record: CheckpointRecord, who: str) -> StrataError:
    """Return the error for an ack or seal that comes too late. If the record is DELETING, it was ABORTED before."""
    if record.state in {CheckpointState.ABORTED, CheckpointState.DELETING}:
        why = record.reason or "it is being deleted"
        return CheckpointAborted(f"the save of step {record.step} was given up: {why}")
    return Conflict(f"step {record.step} is {record.state.value} already, without this digest of {who}")


# -- the end: commit or abort -----------------------------------------------------------------


def decide_commit(job: JobView, entry: Entry[CheckpointRecord]) -> Decision:
    """Commit this OPEN record if its world is current, all ranks have acked and the seal exists; else do nothing.

    Every replica calls this on every view change and at its start. The decision is never a refusal: callers that
    wait for a commit wait for the record to change.
    """
    record = entry.record
    if record.state is not CheckpointState.OPEN:
        return Decision(reason=f"step {record.step} is {record.state.value}")
    head = job.head()
    if head is None or head.record.generation != record.generation:
        return Decision(reason=f"generation {record.generation} of step {record.step} has ended")
    seal = sealed(job, record)
    if seal is None:  # checked first: every ack leads here, and counting acks is expensive
        return Decision(reason=f"step {record.step} is not sealed yet")
    if waiting := missing(job, record):
        return Decision(reason=f"step {record.step} is sealed, and rank {waiting[0]} has not acked")
    committed = dataclasses.replace(
        record,
        state=CheckpointState.COMMITTED,
        size_bytes=seal.size_bytes,
        model_hash=seal.model_hash,
        manifest_digest=seal.digest,
    )
    latest = job.latest()
    operations: list[Operation] = [Put(key=entry.key, value=encode(committed))]
    newer = latest is None or order(record) > (latest.record.generation, latest.record.step)
    if newer and record.generation > job.anew() and record.type in RESTORABLE_TYPES:
        moved = Latest(
            generation=record.generation,
            step=record.step,
            attempt=record.attempt,
            record_generation=record.generation,
        )
        operations.append(Put(key=job.keys.latest, value=encode(moved)))
    return Decision(
        reason=f"step {record.step}: all {record.ranks} ranks and the seal acked",
        txn=Txn(
            compares=(
                unchanged(entry.key, entry.mod_revision),
                unchanged(head.key, head.mod_revision),
                unchanged(job.keys.latest, latest.mod_revision if latest is not None else 0),
                unchanged(job.keys.anew, job.view.mod_revision(job.keys.anew)),
            ),
            success=tuple(operations),
        ),
    )


@refusable
def decide_abort(job: JobView, *, author: Author, step: int, attempt: str, reason: str) -> Decision:
    """Abort the attempt for all ranks; settled once the attempt is aborted, refused once it is committed."""
    try:
        held = attempt_of(job, author.generation, step, attempt)
    except CheckpointAborted as over:
        return Decision(reason=over.message)
    if held.record.state is CheckpointState.ABORTED:
        return Decision(reason=f"step {step} was given up: {held.record.reason}")
    if held.record.state is not CheckpointState.OPEN:
        raise Conflict(f"step {step} is {held.record.state.value} already")
    guards = authorised(job, author)
    return abort_attempt(job, held, reason, guards)


def decide_close(job: JobView, *, through_generation: int, reason: str) -> Decision:
    """Leave no save of these generations OPEN: commit the complete ones, then abort the others.

    Only the leader calls this, and adds its fence. The first call, with the current generation, comes before the
    leader writes a new head. The second, with the same generation, comes afterwards, because a save may have begun
    in between.
    """
    opened = [e for e in _open(job) if e.record.generation <= through_generation]
    for entry in opened:
        decision = decide_commit(job, entry)
        if decision.txn is not None:
            return decision
    if opened:
        record = opened[0].record
        acks = job.keys.acks(*record.where)
        # the compare shows that no ack came since the view; acks are never deleted while the record is OPEN
        return abort_attempt(job, opened[0], reason, (none_newer_in(acks, job.view.revision),))
    return Decision(reason="no save is open")


def _open(job: JobView) -> Iterator[Entry[CheckpointRecord]]:
    return (e for e in job.checkpoints() if e.record.state is CheckpointState.OPEN)
