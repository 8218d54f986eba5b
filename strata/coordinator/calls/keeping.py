"""What keeps checkpoints, copies them and takes them away: the rest of what `Checkpoints` offers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from strata.coordinator.calls.dispatch import Answer
from strata.coordinator.calls.lookups import existing_job, job_view
from strata.coordinator.calls.pages import fill
from strata.coordinator.context import ReplicaContext
from strata.core import retention_plan
from strata.core.checkpoint_chores import chores, decide_adopt
from strata.core.checkpoint_copies import decide_report_copy
from strata.core.checkpoint_damage import decide_report_damage
from strata.core.checkpoint_fork import decide_fork, decide_rewind, find_committed
from strata.core.checkpoint_order import find
from strata.core.checkpoint_pins import (
    decide_close_reader,
    decide_open,
    decide_tag,
    decide_untag,
    reader_lease,
    tagged,
)
from strata.core.ids import checked_id
from strata.core.job import JobView
from strata.core.records import CheckpointRecord
from strata.core.txn import Decision
from strata.core.view import Entry
from strata.errors import InvalidArgument, NotFound, StrataError, Unavailable
from strata.v1 import checkpoints_pb2 as pb
from strata.v1 import retention_pb2 as retention_pb
from strata.wire import checkpoints as wire

Find = Callable[[JobView], Entry[CheckpointRecord] | None]

READER_TTL_S: Final = 60
MAX_READER_TTL_S: Final = 3600


class KeepingCalls:
    """Answers what concerns a checkpoint after it was committed."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    def table(self) -> Mapping[str, Answer]:
        return {
            "tag_checkpoint": self.tag,
            "untag_checkpoint": self.untag,
            "open_checkpoint": self.open,
            "close_checkpoint": self.close,
            "report_copy": self.report_copy,
            "report_damage": self.report_damage,
            "list_chores": self.list_chores,
            "adopt_checkpoint": self.adopt,
            "set_retention": self.set_retention,
            "get_retention": self.get_retention,
            "fork_checkpoint": self.fork,
            "rewind_job": self.rewind,
        }

    # -- tags and readers

    async def tag(self, request: pb.TagCheckpointRequest) -> pb.TagCheckpointResponse:
        checked_id("tag", request.tag)
        found = await self._settled(
            request.job,
            lambda job: decide_tag(
                job, tag=request.tag, step=request.step, attempt=request.attempt, who=request.who
            ),
            lambda job: tagged(job, request.tag),
        )
        return pb.TagCheckpointResponse(checkpoint=found)

    async def untag(self, request: pb.UntagCheckpointRequest) -> pb.UntagCheckpointResponse:
        checked_id("tag", request.tag)
        await self._settled(
            request.job,
            lambda job: decide_untag(job, tag=request.tag, step=request.step, attempt=request.attempt),
            lambda job: None,
        )
        return pb.UntagCheckpointResponse()

    async def open(self, request: pb.OpenCheckpointRequest) -> pb.OpenCheckpointResponse:
        """Register a reader on a lease of its own, or renew the one it has."""
        ttl_s = request.ttl_s or READER_TTL_S
        if not 1 <= ttl_s <= MAX_READER_TTL_S:
            raise InvalidArgument(f"ttl_s is {ttl_s}", hint=f"1 to {MAX_READER_TTL_S} seconds, or 0")
        checked_id("reader", request.reader)
        lease, granted = await self._lease(request, ttl_s)
        try:
            found = await self._settled(
                request.job,
                lambda job: decide_open(
                    job,
                    step=request.step,
                    attempt=request.attempt,
                    reader=request.reader,
                    who=request.who,
                    lease=lease,
                ),
                lambda job: find(job, request.step, request.attempt),
            )
        except StrataError as error:
            if granted and not error.retryable:  # else the registration may still take effect
                await self._revoke(lease)
            if isinstance(error, NotFound):
                raise Unavailable("the reader's lease ran out before it was registered") from error
            raise
        return pb.OpenCheckpointResponse(checkpoint=found)

    async def _lease(self, request: pb.OpenCheckpointRequest, ttl_s: int) -> tuple[int, bool]:
        """Return the reader's lease, renewed, and whether it is a new one."""
        job = job_view(self._context, request.job)
        held = reader_lease(job, step=request.step, attempt=request.attempt, reader=request.reader)
        if held:
            with contextlib.suppress(NotFound):  # it ran out: a new one takes its place
                await self._context.store.keep_alive(held)
                return held, False
        return (await self._context.store.grant(ttl_s)).id, True

    async def _revoke(self, lease: int) -> None:
        with contextlib.suppress(StrataError):  # it runs out by itself
            await self._context.store.revoke(lease)

    async def close(self, request: pb.CloseCheckpointRequest) -> pb.CloseCheckpointResponse:
        checked_id("reader", request.reader)
        held = reader_lease(
            job_view(self._context, request.job),
            step=request.step,
            attempt=request.attempt,
            reader=request.reader,
        )
        await self._settled(
            request.job,
            lambda job: decide_close_reader(
                job, step=request.step, attempt=request.attempt, reader=request.reader
            ),
            lambda job: None,
        )
        if held:
            await self._revoke(held)
        return pb.CloseCheckpointResponse()

    # -- copies, damage, chores

    async def report_copy(self, request: pb.ReportCopyRequest) -> pb.ReportCopyResponse:
        wanted = wire.copy_request(request)
        found = await self._settled(
            request.job,
            lambda job: decide_report_copy(job, wanted),
            lambda job: find(job, request.step, request.attempt),
        )
        return pb.ReportCopyResponse(checkpoint=found)

    async def report_damage(self, request: pb.ReportDamageRequest) -> pb.ReportDamageResponse:
        report = wire.damage_report(request)
        found = await self._settled(
            request.job,
            lambda job: decide_report_damage(job, report),
            lambda job: find(job, request.step, request.attempt),
        )
        return pb.ReportDamageResponse(checkpoint=found)

    async def list_chores(self, request: pb.ListChoresRequest) -> pb.ListChoresResponse:
        job = await existing_job(self._context, request.job)
        answer = pb.ListChoresResponse(pending=retention_plan.pending(job, now_unix_ms=self._now_unix_ms()))
        fill(
            answer,
            chores(job, request.host),
            key=lambda one: (
                f"{one.step:020d}/{one.generation:020d}/{one.attempt}/{one.tier}/{one.kind.value}"
            ),
            part=lambda one: pb.ListChoresResponse(chores=[wire.chore_message(one)]),
            request=request,
        )
        return answer

    async def adopt(self, request: pb.AdoptCheckpointRequest) -> pb.AdoptCheckpointResponse:
        wanted = wire.adopt_request(request)
        found = await self._settled(
            request.job,
            lambda job: decide_adopt(job, wanted),
            lambda job: find(job, request.step, request.attempt),
        )
        return pb.AdoptCheckpointResponse(checkpoint=found)

    # -- retention

    async def set_retention(
        self, request: retention_pb.SetRetentionRequest
    ) -> retention_pb.SetRetentionResponse:
        await existing_job(self._context, request.job)
        wanted = wire.retention_record(request.retention)
        author, revision = wire.retention_author(request), wire.if_revision(request)
        await self._settled(
            request.job,
            lambda job: retention_plan.decide_set_retention(job, wanted, author=author, if_revision=revision),
            lambda job: None,
        )
        held = retention_plan.retention(job_view(self._context, request.job))
        return retention_pb.SetRetentionResponse(
            retention=wire.retention_message(held.record if held is not None else wanted)
        )

    async def get_retention(
        self, request: retention_pb.GetRetentionRequest
    ) -> retention_pb.GetRetentionResponse:
        job = await existing_job(self._context, request.job)
        held, now = retention_plan.retention(job), self._now_unix_ms()
        answer = retention_pb.GetRetentionResponse()
        if not request.page_token:
            answer = retention_pb.GetRetentionResponse(
                retention=None if held is None else wire.retention_message(held.record),
                revision=0 if held is None else held.mod_revision,
            )
        going = {each.entry.key for each in retention_plan.going(job, now_unix_ms=now)}
        kept: dict[str, list[str]] = {}
        for tier, stays in retention_plan.reasons(job, now_unix_ms=now).items():
            for key, why in stays.items():
                kept.setdefault(key, []).append(f"{tier}: {why}")

        def part(entry: Entry[CheckpointRecord]) -> retention_pb.GetRetentionResponse:
            name = _name(entry.record)
            return retention_pb.GetRetentionResponse(
                kept={name: "; ".join(kept[entry.key])} if entry.key in kept else {},
                going=[name] if entry.key in going else [],
            )

        fill(answer, job.checkpoints(), key=lambda entry: entry.key, part=part, request=request)
        return answer

    # -- beginning elsewhere

    async def fork(self, request: pb.ForkCheckpointRequest) -> pb.ForkCheckpointResponse:
        await existing_job(self._context, request.source_job)
        source = self._context.keys.job(request.source_job)
        found = await self._settled(
            request.job,
            lambda job: decide_fork(
                job,
                JobView(job.view, source),
                step=request.step,
                attempt=request.attempt,
                tag=request.tag,
                latest=request.latest,
            ),
            lambda job: next(job.checkpoints(), None),
        )
        return pb.ForkCheckpointResponse(checkpoint=found)

    async def rewind(self, request: pb.RewindJobRequest) -> pb.RewindJobResponse:
        job = await existing_job(self._context, request.job)
        head = job.head()
        generation = request.generation or (head.record.generation if head is not None else 0)
        found = await self._settled(
            request.job,
            lambda job: decide_rewind(
                job,
                generation=generation,
                step=request.step,
                attempt=request.attempt,
                who=request.who,
            ),
            lambda job: find_committed(job, request.step, request.attempt),
        )
        return pb.RewindJobResponse(checkpoint=found)

    # -- inside

    async def _settled(
        self, name: str, decide: Callable[[JobView], Decision], find_it: Find
    ) -> pb.Checkpoint | None:
        """Carry the decision out; return the record as the view then shows it, None if it is gone."""
        keys = self._context.keys.job(name)
        await self._context.executor.settle(lambda view: decide(JobView(view, keys)), coalesce=True)
        job = job_view(self._context, name)
        entry = find_it(job)
        return None if entry is None else wire.checkpoint_message(job, entry)

    def _now_unix_ms(self) -> int:
        return int(self._context.unix_now() * 1000)


def _name(record: CheckpointRecord) -> str:
    return f"{record.step}/{record.attempt}"
