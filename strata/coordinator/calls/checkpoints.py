"""The checkpoint catalog's requests: each one decision, answered from the view."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from strata.coordinator.calls.lookups import existing_job
from strata.coordinator.calls.pages import page
from strata.coordinator.calls.table import Find, Row, as_it_is, change, settled
from strata.coordinator.context import ReplicaContext
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
    """Yield what saves make, pin, copy, judge and take away."""
    changes = partial(change, context)
    yield changes(
        "Checkpoints.BeginCheckpoint",
        wire.begin_request,
        lambda job, wanted: core.decide_begin(job, wanted, now_unix_ms=int(context.unix_now() * 1000)),
        _shown(_of_author),
    )
    calls = CatalogCalls(context)
    yield Row(method="Checkpoints.AckCheckpoint", answer=calls.ack)
    yield changes("Checkpoints.SealCheckpoint", wire.seal_request, core.decide_seal, _shown(_of_author))
    yield changes(
        "Checkpoints.AbortCheckpoint",
        as_it_is,
        lambda job, r: core.decide_abort(
            job, author=wire.author(r.author), step=r.step, attempt=r.attempt, reason=r.reason
        ),
        _shown(_of_author),
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
        _shown(_named),
    )
    yield changes(
        "Checkpoints.UnpinCheckpoint",
        as_it_is,
        lambda job, r: pins.decide_unpin(job, step=r.step, attempt=r.attempt),
        _shown(_named),
    )
    yield changes(
        "Checkpoints.TagCheckpoint",
        _with_tag,
        lambda job, r: pins.decide_tag(job, tag=r.tag, step=r.step, attempt=r.attempt, who=r.who),
        _shown(lambda job, r: pins.tagged(job, r.tag)),
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
        _shown(_named),
    )
    yield Row(method="Checkpoints.ReportCopy", answer=calls.report_copy)
    yield changes("Checkpoints.ReportDamage", wire.damage_report, decide_report_damage, _shown(_named))
    yield changes("Checkpoints.AdoptCheckpoint", wire.adopt_request, decide_adopt, _shown(_named))
    yield Row(method="Checkpoints.GetCheckpoint", answer=calls.get)
    yield Row(method="Checkpoints.ListCheckpoints", answer=calls.list)
    yield Row(method="Checkpoints.OpenCheckpoint", answer=calls.open)
    yield Row(method="Checkpoints.CloseCheckpoint", answer=calls.close)
    yield Row(method="Checkpoints.ForkCheckpoint", answer=calls.fork)
    yield Row(method="Checkpoints.RewindJob", answer=calls.rewind)


def _with_tag(request: Any) -> Any:
    checked_id("tag", request.tag)
    return request


def _of_author(job: JobView, wanted: Any) -> Entry[CheckpointRecord] | None:
    return job.checkpoint(wanted.step, wanted.author.generation)


def _named(job: JobView, wanted: Any) -> Entry[CheckpointRecord] | None:
    return core.find(job, wanted.step, wanted.attempt)


def _shown(find: Callable[[JobView, Any], Entry[CheckpointRecord] | None]) -> Find:
    return lambda job, wanted: _show(job, find(job, wanted))


def _show(job: JobView, entry: Entry[CheckpointRecord] | None) -> Mapping[str, Any]:
    """Return the field with a checkpoint, none if that is gone."""
    return {} if entry is None else {"checkpoint": wire.checkpoint_message(job, entry)}


class CatalogCalls:
    """What is more than one decision."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    async def ack(self, request: pb.AckCheckpointRequest, _identity: Identity | None) -> Any:
        wanted = wire.ack_request(request)
        job = await self._counted(request.job, request.phases, core.decide_ack, wanted, _of_author)
        return pb.AckCheckpointResponse(**_show(job, _of_author(job, wanted)))

    async def report_copy(self, request: pb.ReportCopyRequest, _identity: Identity | None) -> Any:
        wanted = wire.copy_request(request)
        phases = [request.phase] if request.HasField("phase") else []
        job = await self._counted(request.job, phases, decide_report_copy, wanted, _named)
        return pb.ReportCopyResponse(**_show(job, _named(job, wanted)))

    async def _counted(
        self,
        name: str,
        phases: Sequence[SavePhase],
        decide: Callable[[JobView, Any], Decision],
        wanted: Any,
        find: Callable[[JobView, Any], Entry[CheckpointRecord] | None],
    ) -> JobView:
        """Carry a decision out; count the phases once, if it wrote something: a request may come again."""
        wrote = False

        def deciding(job: JobView) -> Decision:
            nonlocal wrote
            decision = decide(job, wanted)
            wrote |= decision.txn is not None
            return decision

        job = await settled(self._context, name, deciding)
        if wrote and phases and (entry := find(job, wanted)) is not None:
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
            await self._context.mirror.fresh()  # a refusal is a decision: it takes a fresh view
            entry = find(job)
        if entry is None:
            raise _absent(request)
        return pb.GetCheckpointResponse(checkpoint=wire.checkpoint_with_reports(job, entry))

    async def list(self, request: pb.ListCheckpointsRequest, _identity: Identity | None) -> Any:
        job = self._context.job(request.job)
        if job.latest() is None:  # a fork has checkpoints before it has a member
            job = await existing_job(self._context, request.job)
        found, after = page(
            job.checkpoints(),
            key=lambda entry: f"{entry.record.step:020d}/{entry.record.generation:020d}",
            make=lambda entry: wire.checkpoint_message(job, entry),
            size=request.page_size,
            token=request.page_token,
        )
        return pb.ListCheckpointsResponse(checkpoints=found, next_page_token=after)

    # -- readers, each on a lease of its own

    async def open(self, request: pb.OpenCheckpointRequest, _identity: Identity | None) -> Any:
        """Register a reader, or renew the lease of the one that there is."""
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
        return pb.OpenCheckpointResponse(**_show(job, _named(job, request)))

    async def _lease(self, request: pb.OpenCheckpointRequest, ttl_s: int) -> tuple[int, bool]:
        """Return the reader's lease, renewed, and whether it is a new one."""
        if held := self._held(request):
            with contextlib.suppress(NotFound):  # it ran out: a new one takes its place
                await self._context.store.keep_alive(held)
                return held, False
        return (await self._context.store.grant(ttl_s)).id, True

    async def close(self, request: pb.CloseCheckpointRequest, _identity: Identity | None) -> Any:
        checked_id("reader", request.reader)
        held = self._held(request)
        await settled(
            self._context,
            request.job,
            lambda job: pins.decide_close_reader(
                job, step=request.step, attempt=request.attempt, reader=request.reader
            ),
        )
        if held:
            await self._revoke(held)
        return pb.CloseCheckpointResponse()

    def _held(self, request: pb.OpenCheckpointRequest | pb.CloseCheckpointRequest) -> int:
        job = self._context.job(request.job)
        return pins.reader_lease(job, step=request.step, attempt=request.attempt, reader=request.reader)

    async def _revoke(self, lease: int) -> None:
        with contextlib.suppress(StrataError):  # it runs out by itself
            await self._context.store.revoke(lease)

    # -- beginning elsewhere

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
        return pb.ForkCheckpointResponse(**_show(job, next(job.checkpoints(), None)))

    async def rewind(self, request: pb.RewindJobRequest, _identity: Identity | None) -> Any:
        """A request that names no generation means the one that is current now, however often this is decided."""
        head = (await existing_job(self._context, request.job)).head()
        generation = request.generation or (head.record.generation if head is not None else 0)
        job = await settled(
            self._context,
            request.job,
            lambda job: decide_rewind(
                job, generation=generation, step=request.step, attempt=request.attempt, who=request.who
            ),
        )
        return pb.RewindJobResponse(**_show(job, find_committed(job, request.step, request.attempt)))


def _absent(request: pb.GetCheckpointRequest) -> CheckpointNotFound:
    if request.latest:
        return CheckpointNotFound(f"job {request.job} has no committed checkpoint")
    if request.tag:
        return CheckpointNotFound(f"job {request.job} has no checkpoint tagged {request.tag}")
    if request.before:
        return CheckpointNotFound(f"job {request.job} has no good checkpoint before step {request.step}")
    which = f"attempt {request.attempt} of step" if request.attempt else "step"
    return CheckpointNotFound(f"job {request.job} has no checkpoint of {which} {request.step}")
