"""Worlds: who trains together."""

from __future__ import annotations

from typing import Any

from strata.coordinator.servicers.answering import Desk, answer
from strata.v1 import worlds_pb2 as pb
from strata.v1.worlds_pb2_grpc import WorldsServicer as Base

# ruff: noqa: N802  # the names are the RPCs'


class WorldsServicer(Base):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def GetWorld(self, request: pb.GetWorldRequest, context: Any) -> pb.GetWorldResponse:
        response: pb.GetWorldResponse = await answer(self._desk, "get_world", request, context)
        return response

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        response: pb.ListJobsResponse = await answer(self._desk, "list_jobs", request, context)
        return response

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        response: pb.GetJobResponse = await answer(self._desk, "get_job", request, context)
        return response

    async def ListGenerations(
        self, request: pb.ListGenerationsRequest, context: Any
    ) -> pb.ListGenerationsResponse:
        response: pb.ListGenerationsResponse = await answer(self._desk, "list_generations", request, context)
        return response

    async def ScaleJob(self, request: pb.ScaleJobRequest, context: Any) -> pb.ScaleJobResponse:
        response: pb.ScaleJobResponse = await answer(self._desk, "scale_job", request, context)
        return response

    async def StopJob(self, request: pb.StopJobRequest, context: Any) -> pb.StopJobResponse:
        response: pb.StopJobResponse = await answer(self._desk, "stop_job", request, context)
        return response

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:
        response: pb.ResumeJobResponse = await answer(self._desk, "resume_job", request, context)
        return response

    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Any) -> pb.DeleteJobResponse:
        response: pb.DeleteJobResponse = await answer(self._desk, "delete_job", request, context)
        return response
