"""The life of a checkpoint in the catalog: begin, ack, seal, commit or abort (PROTOCOLS 8).

    begin ──▶ OPEN ──(every rank acked, sealed)──▶ COMMITTED ──▶ DELETING ──▶ gone
                └──(abort, or a second digest)──▶ ABORTED ──▶ replaced, or DELETING

One slot exists per (step, generation). Its record names one *attempt*; ranks that begin the same
slot join it. Acks are create-once below the attempt and stay while the record is OPEN, so that
"all ranks acked" is a stable predicate: it ends only by a change of the record, and the record is
compared. A commit therefore needs no compare per rank, however large the world.

Every decision is level-triggered: it recognises its own effect, and its result is read from the
view afterwards. A refusal holds only from a view that is as new as a linearizable read begun
after the request came; `Executor.settle` sees to that.
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
"""Where the ranks of a save tell each other what they hold, in the background of their training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AckRequest:
    """One rank's part is durable: `digest` is that of its manifest."""

    author: Author
    step: int
    attempt: str
    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRequest:
    """The global manifest is durable; `size_bytes` is the sum of all images.

    `part_digests` are those of the ranks' manifests that it names, in their order; empty: not said.
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
    """Record that one rank's part is durable, once; a second digest ends the attempt."""
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

    `Conflict` when it names another part than its rank acked: then it was composed of what is not
    what the rank wrote.
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
    """Return which of the manifest's parts is not the one that its rank acked, or ""."""
    if len(digests) != record.ranks:
        return f"its manifest names {len(digests)} parts, and {record.ranks} ranks save"
    for rank, digest in enumerate(digests):
        ack = job.view.record(job.keys.ack(*record.where, rank), Ack)
        if ack is not None and ack.digest != digest:
            return f"rank {rank} acked {ack.digest}, and its manifest names {digest}"
    return ""


def _ended(record: CheckpointRecord, who: str) -> StrataError:
    """Return why what was not acked in time is not wanted any more; a DELETING one was given up before."""
    if record.state in {CheckpointState.ABORTED, CheckpointState.DELETING}:
        why = record.reason or "it is being cleared away"
        return CheckpointAborted(f"the save of step {record.step} was given up: {why}")
    return Conflict(f"step {record.step} is {record.state.value} already, without this digest of {who}")


# -- the end: commit or abort -----------------------------------------------------------------


def decide_commit(job: JobView, entry: Entry[CheckpointRecord]) -> Decision:
    """Commit this OPEN record if its world is current and everybody acked; else do nothing.

    Any replica decides this on every view change and at its start. It refuses nothing: who waits
    for a commit waits on the record.
    """
    record = entry.record
    if record.state is not CheckpointState.OPEN:
        return Decision(reason=f"step {record.step} is {record.state.value}")
    head = job.head()
    if head is None or head.record.generation != record.generation:
        return Decision(reason=f"generation {record.generation} of step {record.step} has ended")
    seal = sealed(job, record)
    if seal is None:  # looked at first: every ack of every rank leads here, and counting is dear
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
    """Give the attempt up for all ranks; settled when it is over, refused once it is committed."""
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

    For the leader, which adds its fence: before it writes a new head with the current
    generation, after it with the one before (a save may have begun in between).
    """
    opened = [e for e in _open(job) if e.record.generation <= through_generation]
    for entry in opened:
        decision = decide_commit(job, entry)
        if decision.txn is not None:
            return decision
    if opened:
        record = opened[0].record
        acks = job.keys.acks(*record.where)
        # Nothing came that would make it complete; acks never go while it is OPEN.
        return abort_attempt(job, opened[0], reason, (none_newer_in(acks, job.view.revision),))
    return Decision(reason="no save is open")


def _open(job: JobView) -> Iterator[Entry[CheckpointRecord]]:
    return (e for e in job.checkpoints() if e.record.state is CheckpointState.OPEN)
