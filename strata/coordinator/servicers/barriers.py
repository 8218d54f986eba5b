"""Barriers: all ranks of a generation, or a stated subset, meet."""

from __future__ import annotations

from typing import Any

from strata.coordinator.servicers.answering import Desk, answer
from strata.v1 import barriers_pb2 as pb
from strata.v1.barriers_pb2_grpc import BarriersServicer as Base

# ruff: noqa: N802  # the names are the RPCs'


class BarriersServicer(Base):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def WaitBarrier(self, request: pb.WaitBarrierRequest, context: Any) -> pb.WaitBarrierResponse:
        response: pb.WaitBarrierResponse = await answer(self._desk, "wait_barrier", request, context)
        return response

    async def ListBarriers(self, request: pb.ListBarriersRequest, context: Any) -> pb.ListBarriersResponse:
        response: pb.ListBarriersResponse = await answer(self._desk, "list_barriers", request, context)
        return response
