"""The calls of the checkpoint catalog. Each is one decision, answered from the view."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from strata.coordinator.calls.pages import page
from strata.coordinator.calls.table import Find, Row, as_it_is, change, settled
from strata.coordinator.context import ReplicaContext, existing_job
from strata.core.access.authority import Identity
from strata.core.checkpoints import lifecycle as core
from strata.core.checkpoints import pins
from strata.core.checkpoints.copies import decide_report_copy
from strata.core.checkpoints.corruption import decide_report_damage
from strata.core.checkpoints.fork import decide_fork, decide_rewind, find_committed
from strata.core.checkpoints.maintenance import decide_adopt
from strata.core.ids import checked_id
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord
from strata.core.kv.txn import Decision
from strata.core.kv.view import Entry
from strata.core.stop.save_hold import decide_hold_saves
from strata.errors import CheckpointNotFound, InvalidArgument, NotFound, StrataError, Unavailable
from strata.v1 import checkpoints_pb2 as pb
from strata.v1.common_pb2 import SavePhase
from strata.wire import checkpoints as wire

READER_TTL_S: Final = 60
MAX_READER_TTL_S: Final = 3600


def catalog(context: ReplicaContext) -> Iterator[Row]:
    """Yield the rows of calls that save, pin, tag, copy, adopt and delete checkpoints, or report damage."""
    changes = partial(change, context)
    yield changes(
        "Checkpoints.BeginCheckpoint",
        wire.begin_request,
        lambda job, decoded: core.decide_begin(job, decoded, now_unix_ms=int(context.unix_now() * 1000)),
        _with_checkpoint(_of_author),
    )
    calls = CatalogCalls(context)
    yield Row(method="Checkpoints.AckCheckpoint", answer=calls.ack)
    yield changes(
        "Checkpoints.SealCheckpoint", wire.seal_request, core.decide_seal, _with_checkpoint(_of_author)
    )
    yield changes(
        "Checkpoints.AbortCheckpoint",
        as_it_is,
        lambda job, r: core.decide_abort(
            job, author=wire.author(r.author), step=r.step, attempt=r.attempt, reason=r.reason
        ),
        _with_checkpoint(_of_author),
    )
    yield changes(
        "Checkpoints.HoldSaves",
        as_it_is,
        lambda job, r: decide_hold_saves(
            job, author=wire.author(r.author), step=r.step, reason=r.reason, host=r.host
        ),
    )
    yield changes(
        "Checkpoints.PinCheckpoint",
        as_it_is,
        lambda job, r: pins.decide_pin(job, step=r.step, attempt=r.attempt, who=r.who, why=r.why),
        _with_checkpoint(_named),
    )
    yield changes(
        "Checkpoints.UnpinCheckpoint",
        as_it_is,
        lambda job, r: pins.decide_unpin(job, step=r.step, attempt=r.attempt),
        _with_checkpoint(_named),
    )
    yield changes(
        "Checkpoints.TagCheckpoint",
        _with_tag,
        lambda job, r: pins.decide_tag(job, tag=r.tag, step=r.step, attempt=r.attempt, who=r.who),
        _with_checkpoint(lambda job, r: pins.tagged(job, r.tag)),
    )
    yield changes(
        "Checkpoints.UntagCheckpoint",
        _with_tag,
        lambda job, r: pins.decide_untag(job, tag=r.tag, step=r.step, attempt=r.attempt),
    )
    yield changes(
        "Checkpoints.DeleteCheckpoint",
        as_it_is,
        lambda job, r: core.decide_delete(
            job, step=r.step, attempt=r.attempt, finished=r.finished, tier=r.tier, host=r.host
        ),
        _with_checkpoint(_named),
    )
    yield Row(method="Checkpoints.ReportCopy", answer=calls.report_copy)
    yield changes(
        "Checkpoints.ReportDamage", wire.damage_report, decide_report_damage, _with_checkpoint(_named)
    )
    yield changes("Checkpoints.AdoptCheckpoint", wire.adopt_request, decide_adopt, _with_checkpoint(_named))
    yield Row(method="Checkpoints.GetCheckpoint", answer=calls.get)
    yield Row(method="Checkpoints.ListCheckpoints", answer=calls.list)
    yield Row(method="Checkpoints.OpenCheckpoint", answer=calls.open)
    yield Row(method="Checkpoints.CloseCheckpoint", answer=calls.close)
    yield Row(method="Checkpoints.ForkCheckpoint", answer=calls.fork)
    yield Row(method="Checkpoints.RewindJob", answer=calls.rewind)


def _with_tag(request: Any) -> Any:
    checked_id("tag", request.tag)
    return request


def _of_author(job: JobView, decoded: Any) -> Entry[CheckpointRecord] | None:
    return job.checkpoint(decoded.step, decoded.author.generation)


def _named(job: JobView, decoded: Any) -> Entry[CheckpointRecord] | None:
    return core.find(job, decoded.step, decoded.attempt)


def _with_checkpoint(find: Callable[[JobView, Any], Entry[CheckpointRecord] | None]) -> Find:
    return lambda job, decoded: _checkpoint_field(job, find(job, decoded))


def _checkpoint_field(job: JobView, entry: Entry[CheckpointRecord] | None) -> Mapping[str, Any]:
    """Return the response field with a checkpoint; empty if the checkpoint no longer exists."""
    return {} if entry is None else {"checkpoint": wire.checkpoint_message(job, entry)}


class CatalogCalls:
    """Answers the calls that need more than one decision."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    async def ack(self, request: pb.AckCheckpointRequest, _identity: Identity | None) -> Any:
        decoded = wire.ack_request(request)
        job = await self._settle_counting_phases(
            request.job, request.phases, core.decide_ack, decoded, _of_author
        )
        return pb.AckCheckpointResponse(**_checkpoint_field(job, _of_author(job, decoded)))

    async def report_copy(self, request: pb.ReportCopyRequest, _identity: Identity | None) -> Any:
        decoded = wire.copy_request(request)
        phases = [request.phase] if request.HasField("phase") else []
        job = await self._settle_counting_phases(request.job, phases, decide_report_copy, decoded, _named)
        return pb.ReportCopyResponse(**_checkpoint_field(job, _named(job, decoded)))

    async def _settle_counting_phases(
        self,
        name: str,
        phases: Sequence[SavePhase],
        decide: Callable[[JobView, Any], Decision],
        decoded: Any,
        find: Callable[[JobView, Any], Entry[CheckpointRecord] | None],
    ) -> JobView:
        """Settle a decision; count the phases only if the decision wrote, since a repeated request must not count
        twice.
        """
        wrote = False

        def deciding(job: JobView) -> Decision:
            nonlocal wrote
            decision = decide(job, decoded)
            wrote |= decision.txn is not None
            return decision

        job = await settled(self._context, name, deciding)
        if wrote and phases and (entry := find(job, decoded)) is not None:
            self._context.save_times.reported(entry.record.type, phases)
        return job

    async def get(self, request: pb.GetCheckpointRequest, _identity: Identity | None) -> Any:
        def find(job: JobView) -> Entry[CheckpointRecord] | None:
            if request.latest:
                return core.newest(job)
            if request.tag:
                return pins.tagged(job, request.tag)
            named = core.find(job, request.step, request.attempt)
            if request.before:
                return None if named is None else core.newest(job, before=core.counts(job, named.record))
            return named

        job = self._context.job(request.job)
        entry = find(job)
        if entry is None:
            await self._context.mirror.fresh()  # a refusal is a decision and needs a fresh view
            entry = find(job)
        if entry is None:
            raise _absent(request)
        return pb.GetCheckpointResponse(checkpoint=wire.checkpoint_with_reports(job, entry))

    async def list(self, request: pb.ListCheckpointsRequest, _identity: Identity | None) -> Any:
        job = self._context.job(request.job)
        if job.latest() is None:  # a forked job has checkpoints before it has a member
            job = await existing_job(self._context, request.job)
        found, after = page(
            job.checkpoints(),
            key=lambda entry: f"{entry.record.step:020d}/{entry.record.generation:020d}",
            make=lambda entry: wire.checkpoint_message(job, entry),
            size=request.page_size,
            token=request.page_token,
        )
        return pb.ListCheckpointsResponse(checkpoints=found, next_page_token=after)

    # -- readers, each with a lease of its own

    async def open(self, request: pb.OpenCheckpointRequest, _identity: Identity | None) -> Any:
        """Register a reader, or renew its existing lease."""
        ttl_s = request.ttl_s or READER_TTL_S
        if not 1 <= ttl_s <= MAX_READER_TTL_S:
            raise InvalidArgument(f"ttl_s is {ttl_s}", hint=f"1 to {MAX_READER_TTL_S} seconds, or 0")
        checked_id("reader", request.reader)
        lease, granted = await self._lease(request, ttl_s)
        try:
            job = await settled(
                self._context,
                request.job,
                lambda job: pins.decide_open(
                    job,
                    step=request.step,
                    attempt=request.attempt,
                    reader=request.reader,
                    who=request.who,
                    lease=lease,
                ),
            )
        except StrataError as error:
            if granted and not error.retryable:  # else the registration may still take effect
                await self._revoke(lease)
            if isinstance(error, NotFound):
                raise Unavailable("the reader's lease ran out before it was registered") from error
            raise
        return pb.OpenCheckpointResponse(**_checkpoint_field(job, _named(job, request)))

    async def _lease(self, request: pb.OpenCheckpointRequest, ttl_s: int) -> tuple[int, bool]:
        """Return the reader's lease, renewed or newly granted, and whether it is new."""
        if lease := self._reader_lease(request):
            with contextlib.suppress(NotFound):  # the lease expired: grant a new one
                await self._context.store.keep_alive(lease)
                return lease, False
        return (await self._context.store.grant(ttl_s)).id, True

    async def close(self, request: pb.CloseCheckpointRequest, _identity: Identity | None) -> Any:
        checked_id("reader", request.reader)
        lease = self._reader_lease(request)
        await settled(
            self._context,
            request.job,
            lambda job: pins.decide_close_reader(
                job, step=request.step, attempt=request.attempt, reader=request.reader
            ),
        )
        if lease:
            await self._revoke(lease)
        return pb.CloseCheckpointResponse()

    def _reader_lease(self, request: pb.OpenCheckpointRequest | pb.CloseCheckpointRequest) -> int:
        job = self._context.job(request.job)
        return pins.reader_lease(job, step=request.step, attempt=request.attempt, reader=request.reader)

    async def _revoke(self, lease: int) -> None:
        with contextlib.suppress(StrataError):  # the lease expires by itself
            await self._context.store.revoke(lease)

    # -- fork and rewind

    async def fork(self, request: pb.ForkCheckpointRequest, _identity: Identity | None) -> Any:
        await existing_job(self._context, request.source_job)
        source = self._context.keys.job(request.source_job)
        job = await settled(
            self._context,
            request.job,
            lambda job: decide_fork(
                job,
                JobView(job.view, source),
                step=request.step,
                attempt=request.attempt,
                tag=request.tag,
                latest=request.latest,
            ),
        )
        return pb.ForkCheckpointResponse(**_checkpoint_field(job, next(job.checkpoints(), None)))

    async def rewind(self, request: pb.RewindJobRequest, _identity: Identity | None) -> Any:
        """Rewind a job. If the request names no generation, read the current one once, before the first decision."""
        head = (await existing_job(self._context, request.job)).head()
        generation = request.generation or (head.record.generation if head is not None else 0)
        job = await settled(
            self._context,
            request.job,
            lambda job: decide_rewind(
                job, generation=generation, step=request.step, attempt=request.attempt, who=request.who
            ),
        )
        return pb.RewindJobResponse(
            **_checkpoint_field(job, find_committed(job, request.step, request.attempt))
        )


def _absent(request: pb.GetCheckpointRequest) -> CheckpointNotFound:
    if request.latest:
        return CheckpointNotFound(f"job {request.job} has no committed checkpoint")
    if request.tag:
        return CheckpointNotFound(f"job {request.job} has no checkpoint tagged {request.tag}")
    if request.before:
        return CheckpointNotFound(f"job {request.job} has no good checkpoint before step {request.step}")
    which = f"attempt {request.attempt} of step" if request.attempt else "step"
    return CheckpointNotFound(f"job {request.job} has no checkpoint of {which} {request.step}")
