"""The checkpoint catalog's requests: each one decision, answered from the view."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from strata.coordinator.calls.dispatch import Answer
from strata.coordinator.calls.lookups import existing_job, job_view
from strata.coordinator.calls.pages import page
from strata.coordinator.context import ReplicaContext
from strata.core import checkpoints as core
from strata.core.checkpoint_pins import tagged
from strata.core.job import JobView
from strata.core.records import CheckpointRecord
from strata.core.save_hold import decide_hold_saves
from strata.core.txn import Decision
from strata.core.view import Entry
from strata.errors import CheckpointNotFound
from strata.v1 import checkpoints_pb2 as pb
from strata.wire import checkpoints as wire

Find = Callable[[JobView], Entry[CheckpointRecord] | None]


class CatalogCalls:
    """Answers what `Checkpoints` offers."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    def table(self) -> Mapping[str, Answer]:
        return {
            "begin_checkpoint": self.begin,
            "ack_checkpoint": self.ack,
            "seal_checkpoint": self.seal,
            "abort_checkpoint": self.abort,
            "hold_saves": self.hold,
            "get_checkpoint": self.get,
            "list_checkpoints": self.list,
            "pin_checkpoint": self.pin,
            "unpin_checkpoint": self.unpin,
            "delete_checkpoint": self.delete,
        }

    async def begin(self, request: pb.BeginCheckpointRequest) -> pb.BeginCheckpointResponse:
        wanted = wire.begin_request(request)
        now_unix_ms = int(self._context.unix_now() * 1000)
        found = await self._settled(
            request.job,
            lambda job: core.decide_begin(job, wanted, now_unix_ms=now_unix_ms),
            lambda job: job.checkpoint(wanted.step, wanted.author.generation),
        )
        return pb.BeginCheckpointResponse(checkpoint=found)

    async def ack(self, request: pb.AckCheckpointRequest) -> pb.AckCheckpointResponse:
        wanted = wire.ack_request(request)
        found = await self._settled(
            request.job,
            lambda job: core.decide_ack(job, wanted),
            lambda job: job.checkpoint(wanted.step, wanted.author.generation),
        )
        return pb.AckCheckpointResponse(checkpoint=found)

    async def seal(self, request: pb.SealCheckpointRequest) -> pb.SealCheckpointResponse:
        wanted = wire.seal_request(request)
        found = await self._settled(
            request.job,
            lambda job: core.decide_seal(job, wanted),
            lambda job: job.checkpoint(wanted.step, wanted.author.generation),
        )
        return pb.SealCheckpointResponse(checkpoint=found)

    async def abort(self, request: pb.AbortCheckpointRequest) -> pb.AbortCheckpointResponse:
        author = wire.author(request.author)
        found = await self._settled(
            request.job,
            lambda job: core.decide_abort(
                job, author=author, step=request.step, attempt=request.attempt, reason=request.reason
            ),
            lambda job: job.checkpoint(request.step, author.generation),
        )
        return pb.AbortCheckpointResponse(checkpoint=found)

    async def hold(self, request: pb.HoldSavesRequest) -> pb.HoldSavesResponse:
        author = wire.author(request.author)
        await self._settled(
            request.job,
            lambda job: decide_hold_saves(
                job, author=author, step=request.step, reason=request.reason, host=request.host
            ),
            lambda job: None,
        )
        return pb.HoldSavesResponse()

    async def get(self, request: pb.GetCheckpointRequest) -> pb.GetCheckpointResponse:
        def find(job: JobView) -> Entry[CheckpointRecord] | None:
            if request.latest:
                return core.newest(job)
            if request.tag:
                return tagged(job, request.tag)
            named = core.find(job, request.step, request.attempt)
            if request.before:
                return None if named is None else core.newest(job, before=core.counts(job, named.record))
            return named

        job = job_view(self._context, request.job)
        entry = find(job)
        if entry is None:
            await self._context.mirror.fresh()  # a refusal is a decision: it takes a fresh view
            entry = find(job)
        if entry is None:
            raise _absent(request)
        return pb.GetCheckpointResponse(checkpoint=wire.checkpoint_with_doubts(job, entry))

    async def list(self, request: pb.ListCheckpointsRequest) -> pb.ListCheckpointsResponse:
        job = job_view(self._context, request.job)
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

    async def pin(self, request: pb.PinCheckpointRequest) -> pb.PinCheckpointResponse:
        found = await self._settled(
            request.job,
            lambda job: core.decide_pin(
                job, step=request.step, attempt=request.attempt, who=request.who, why=request.why
            ),
            lambda job: core.find(job, request.step, request.attempt),
        )
        return pb.PinCheckpointResponse(checkpoint=found)

    async def unpin(self, request: pb.UnpinCheckpointRequest) -> pb.UnpinCheckpointResponse:
        found = await self._settled(
            request.job,
            lambda job: core.decide_unpin(job, step=request.step, attempt=request.attempt),
            lambda job: core.find(job, request.step, request.attempt),
        )
        return pb.UnpinCheckpointResponse(checkpoint=found)

    async def delete(self, request: pb.DeleteCheckpointRequest) -> pb.DeleteCheckpointResponse:
        found = await self._settled(
            request.job,
            lambda job: core.decide_delete(
                job,
                step=request.step,
                attempt=request.attempt,
                finished=request.finished,
                tier=request.tier,
                host=request.host,
            ),
            lambda job: core.find(job, request.step, request.attempt),
        )
        return pb.DeleteCheckpointResponse(checkpoint=found)

    # -- inside

    async def _settled(
        self, name: str, decide: Callable[[JobView], Decision], find: Find
    ) -> pb.Checkpoint | None:
        """Carry the decision out; return the record as the view then shows it, None if it is gone."""
        keys = self._context.keys.job(name)
        await self._context.executor.settle(lambda view: decide(JobView(view, keys)), coalesce=True)
        job = job_view(self._context, name)
        entry = find(job)
        return None if entry is None else wire.checkpoint_message(job, entry)


def _absent(request: pb.GetCheckpointRequest) -> CheckpointNotFound:
    if request.latest:
        return CheckpointNotFound(f"job {request.job} has no committed checkpoint")
    if request.tag:
        return CheckpointNotFound(f"job {request.job} has no checkpoint tagged {request.tag}")
    if request.before:
        return CheckpointNotFound(f"job {request.job} has no good checkpoint before step {request.step}")
    which = f"attempt {request.attempt} of step" if request.attempt else "step"
    return CheckpointNotFound(f"job {request.job} has no checkpoint of {which} {request.step}")
