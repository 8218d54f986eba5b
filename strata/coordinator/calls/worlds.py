"""The calls about jobs and their worlds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from strata.coordinator.calls.pages import fill, of_state, page
from strata.coordinator.calls.table import Row, as_it_is, change, settled
from strata.coordinator.context import ReplicaContext, existing_job
from strata.coordinator.status.diagnosis import LiveReports, diagnose_job
from strata.core.access.authority import Identity
from strata.core.job import JobView, World, job_names
from strata.core.job_requests import decide_delete, decide_resume, decide_scale
from strata.core.stop.requests import decide_stop
from strata.errors import InvalidArgument, StaleGeneration
from strata.v1 import worlds_pb2
from strata.wire import worlds as wire


class WorldCalls:
    """Answers the methods of `Worlds`."""

    def __init__(self, context: ReplicaContext, live: LiveReports) -> None:
        self._context = context
        self._live = live
        self._answers: WeakKeyDictionary[World, dict[str, worlds_pb2.GetWorldResponse]] = WeakKeyDictionary()
        """Answers with the members of a world, cached by page: thousands of callers may request them."""

    def rows(self) -> Iterator[Row]:
        def changed(job: JobView, _request: Any) -> Mapping[str, Any]:
            return {"job": self._job(job)}

        changes = partial(change, self._context, exists=True)
        yield changes(
            "Worlds.ScaleJob",
            as_it_is,
            lambda job, r: decide_scale(job, min_workers=r.min_workers, max_workers=r.max_workers),
            changed,
        )
        yield changes("Worlds.ResumeJob", as_it_is, lambda job, _request: decide_resume(job), changed)
        yield changes("Worlds.DeleteJob", as_it_is, lambda job, _request: decide_delete(job))
        yield Row(method="Worlds.StopJob", answer=self.stop_job)
        yield Row(method="Worlds.GetJob", answer=self.get_job)
        yield Row(method="Worlds.GetWorld", answer=self.get_world)
        yield Row(method="Worlds.ListGenerations", answer=self.list_generations)
        yield Row(method="Worlds.ListJobs", answer=self.list_jobs)

    async def get_world(
        self, request: worlds_pb2.GetWorldRequest, _identity: Identity | None
    ) -> worlds_pb2.GetWorldResponse:
        """Return an empty answer if the job has no world yet."""
        job = await existing_job(self._context, request.job)
        world = job.world()
        prefix = of_state(f"the world of {request.job}", request.page_token, job.head())
        if world is None:
            return worlds_pb2.GetWorldResponse()
        cached, token = self._answers.setdefault(world, {}), request.page_token
        answer = cached.get(token) if not request.page_size else None
        if answer is None:
            answer = self._members(job, world, prefix, request)
            if not request.page_size and token in {"", *(page.next_page_token for page in cached.values())}:
                cached[token] = (
                    answer  # cache only pages whose token an answer contained: a caller may invent tokens
                )
        response = worlds_pb2.GetWorldResponse()
        response.CopyFrom(answer)
        if not request.page_token:
            response.world.CopyFrom(wire.world_message(job, world.head))
        return response

    def _members(
        self, job: JobView, world: World, prefix: str, request: worlds_pb2.GetWorldRequest
    ) -> worlds_pb2.GetWorldResponse:
        """Return one page of members, with space left for the head; the caller adds the head."""
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

    async def list_jobs(
        self, request: worlds_pb2.ListJobsRequest, _identity: Identity | None
    ) -> worlds_pb2.ListJobsResponse:
        jobs, after = page(
            job_names(self._context.mirror.view, self._context.keys),
            key=str,
            make=lambda name: self._job(self._context.job(name)),
            size=request.page_size,
            token=request.page_token,
        )
        return worlds_pb2.ListJobsResponse(jobs=jobs, next_page_token=after)

    async def get_job(
        self, request: worlds_pb2.GetJobRequest, _identity: Identity | None
    ) -> worlds_pb2.GetJobResponse:
        return worlds_pb2.GetJobResponse(job=self._job(await existing_job(self._context, request.job)))

    def _job(self, job: JobView) -> worlds_pb2.Job:
        """Return a job with the diagnosis of its ranks, as far as this replica has reports."""
        message = wire.job_message(job)
        found = diagnose_job(self._live, job)
        message.diagnosis = found.says
        message.suspects.extend(found.suspects)
        return message

    async def list_generations(
        self, request: worlds_pb2.ListGenerationsRequest, _identity: Identity | None
    ) -> worlds_pb2.ListGenerationsResponse:
        """List generations, newest first; `InvalidArgument` for a limit below 0."""
        if request.limit < 0:
            raise InvalidArgument(f"a limit of {request.limit}", hint="0 requests all that are kept")
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

    async def stop_job(
        self, request: worlds_pb2.StopJobRequest, _identity: Identity | None
    ) -> worlds_pb2.StopJobResponse:
        """Stop one generation of a job: the requested one, or the current one if the request names none."""
        while True:
            stop = wire.stop_request(request)
            job = await existing_job(self._context, request.job)
            await self._context.mirror.fresh()
            head = job.head()
            current = head.record.generation if head is not None else 0
            stop = replace(stop, generation=stop.generation or current)
            try:
                await settled(self._context, request.job, partial(decide_stop, request=stop))
            except StaleGeneration:
                if request.generation:
                    raise
                continue
            notice = job.notice(stop.generation) if stop.generation else None
            return worlds_pb2.StopJobResponse(
                notice=None if notice is None else wire.notice_message(stop.generation, notice.record)
            )
