"""Requests about jobs and worlds: who trains together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from strata.coordinator.calls.dispatch import Answer
from strata.coordinator.calls.lookups import existing_job, job_view
from strata.coordinator.calls.pages import fill, of_state, page
from strata.coordinator.context import ReplicaContext
from strata.coordinator.diagnosis import diagnose_job
from strata.core.job import JobView, World, job_names
from strata.core.job_requests import decide_delete, decide_resume, decide_scale
from strata.core.stopping import decide_stop
from strata.core.txn import Decision
from strata.errors import InvalidArgument, StaleGeneration
from strata.v1 import worlds_pb2
from strata.wire import worlds as wire


class WorldCalls:
    """Answers what `Worlds` offers."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._answers: WeakKeyDictionary[World, dict[str, worlds_pb2.GetWorldResponse]] = WeakKeyDictionary()
        """What is said of the members of a world, each page made once: thousands may ask."""

    def table(self) -> Mapping[str, Answer]:
        return {
            "get_world": self.get_world,
            "list_jobs": self.list_jobs,
            "get_job": self.get_job,
            "list_generations": self.list_generations,
            "scale_job": self.scale_job,
            "stop_job": self.stop_job,
            "resume_job": self.resume_job,
            "delete_job": self.delete_job,
        }

    async def get_world(self, request: worlds_pb2.GetWorldRequest) -> worlds_pb2.GetWorldResponse:
        """A job that has no world yet has an empty answer."""
        job = await existing_job(self._context, request.job)
        world = job.world()
        prefix = of_state(f"the world of {request.job}", request.page_token, job.head())
        if world is None:
            return worlds_pb2.GetWorldResponse()
        made, token = self._answers.setdefault(world, {}), request.page_token
        answer = made.get(token) if not request.page_size else None
        if answer is None:
            answer = self._members(job, world, prefix, request)
            if not request.page_size and token in {"", *(page.next_page_token for page in made.values())}:
                made[token] = answer  # one that no answer had is somebody's invention
        response = worlds_pb2.GetWorldResponse()
        response.CopyFrom(answer)
        if not request.page_token:
            response.world.CopyFrom(wire.world_message(job, world.head))
        return response

    def _members(
        self, job: JobView, world: World, prefix: str, request: worlds_pb2.GetWorldRequest
    ) -> worlds_pb2.GetWorldResponse:
        """Return the members of one page; the head, which is beside them, is counted."""
        answer = worlds_pb2.GetWorldResponse(world=wire.world_message(job, world.head))
        fill(
            answer,
            world.members,
            key=lambda member: f"{prefix}{member.group_rank:010d}",
            part=lambda member: worlds_pb2.GetWorldResponse(members=[wire.place_message(member)]),
            request=request,
        )
        answer.ClearField("world")
        return answer

    async def list_jobs(self, request: worlds_pb2.ListJobsRequest) -> worlds_pb2.ListJobsResponse:
        jobs, after = page(
            job_names(self._context.mirror.view, self._context.keys),
            key=str,
            make=lambda name: self._job(job_view(self._context, name)),
            size=request.page_size,
            token=request.page_token,
        )
        return worlds_pb2.ListJobsResponse(jobs=jobs, next_page_token=after)

    async def get_job(self, request: worlds_pb2.GetJobRequest) -> worlds_pb2.GetJobResponse:
        return worlds_pb2.GetJobResponse(job=self._job(await existing_job(self._context, request.job)))

    def _job(self, job: JobView) -> worlds_pb2.Job:
        """Return a job with what is wrong with its ranks, as far as this replica heard."""
        message = wire.job_message(job)
        if (told := self._context.soft.state) is not None:
            found = diagnose_job(told, job)
            message.trouble = found.says
            message.suspects.extend(found.suspects)
        return message

    async def list_generations(
        self, request: worlds_pb2.ListGenerationsRequest
    ) -> worlds_pb2.ListGenerationsResponse:
        """The newest first; a limit below 0 is a mistake."""
        if request.limit < 0:
            raise InvalidArgument(f"a limit of {request.limit}", hint="0 asks for all that are kept")
        job = await existing_job(self._context, request.job)
        newest_first = job.history()[::-1][: request.limit or None]
        generations, after = page(
            newest_first,
            key=lambda entry: f"{2**63 - int(entry.name):020d}",
            make=lambda entry: wire.generation_message(job, entry),
            size=request.page_size,
            token=request.page_token,
        )
        return worlds_pb2.ListGenerationsResponse(generations=generations, next_page_token=after)

    async def scale_job(self, request: worlds_pb2.ScaleJobRequest) -> worlds_pb2.ScaleJobResponse:
        job = await self._decided(
            request.job,
            lambda job: decide_scale(job, min_workers=request.min_workers, max_workers=request.max_workers),
        )
        return worlds_pb2.ScaleJobResponse(job=self._job(job))

    async def stop_job(self, request: worlds_pb2.StopJobRequest) -> worlds_pb2.StopJobResponse:
        """A request for the current generation means the one it first finds, and no later one twice."""
        while True:
            asked = wire.stop_request(request)
            job = await existing_job(self._context, request.job)
            await self._context.mirror.fresh()
            head = job.head()
            current = head.record.generation if head is not None else 0
            asked = replace(asked, generation=asked.generation or current)
            try:
                await self._decided(request.job, partial(decide_stop, request=asked))
            except StaleGeneration:
                if request.generation:
                    raise
                continue
            notice = job.notice(asked.generation) if asked.generation else None
            return worlds_pb2.StopJobResponse(
                notice=None if notice is None else wire.notice_message(asked.generation, notice.record)
            )

    async def resume_job(self, request: worlds_pb2.ResumeJobRequest) -> worlds_pb2.ResumeJobResponse:
        job = await self._decided(request.job, decide_resume)
        return worlds_pb2.ResumeJobResponse(job=self._job(job))

    async def delete_job(self, request: worlds_pb2.DeleteJobRequest) -> worlds_pb2.DeleteJobResponse:
        await self._decided(request.job, decide_delete)
        return worlds_pb2.DeleteJobResponse()

    async def _decided(self, name: str, decide: Callable[[JobView], Decision]) -> JobView:
        """Settle a decision about a job that exists; return the job as it then is."""
        job = await existing_job(self._context, name)
        await self._context.executor.settle(lambda view: decide(JobView(view, job.keys)))
        return job
