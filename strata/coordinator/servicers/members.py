"""Members: the unary way in, for clients that hold no session."""

from __future__ import annotations

from typing import Any

from strata.coordinator.servicers.answering import Desk, answer
from strata.core.registration import DEFAULT_JOB
from strata.v1 import members_pb2 as pb
from strata.v1.members_pb2_grpc import MembersServicer as Base

# ruff: noqa: N802  # the names are the RPCs'


class MembersServicer(Base):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        response: pb.RegisterResponse = await answer(self._desk, "register", request, context)
        return response

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        request.job = request.job or DEFAULT_JOB  # before it is asked whether the caller may act in it
        response: pb.HeartbeatResponse = await answer(self._desk, "heartbeat", request, context)
        return response

    async def ReportRankExit(
        self, request: pb.ReportRankExitRequest, context: Any
    ) -> pb.ReportRankExitResponse:
        response: pb.ReportRankExitResponse = await answer(self._desk, "report_rank_exit", request, context)
        return response

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        response: pb.LeaveResponse = await answer(self._desk, "leave", request, context)
        return response

    async def ListMembers(self, request: pb.ListMembersRequest, context: Any) -> pb.ListMembersResponse:
        response: pb.ListMembersResponse = await answer(self._desk, "list_members", request, context)
        return response
