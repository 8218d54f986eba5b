"""Barriers: all ranks of a generation, or a stated subset, meet."""

from __future__ import annotations

from typing import Any

from strata.coordinator.calls.dispatch import Calls
from strata.coordinator.servicers.answering import answer
from strata.v1 import barriers_pb2 as pb
from strata.v1.barriers_pb2_grpc import BarriersServicer as Base

# ruff: noqa: N802  # the names are the RPCs'


class BarriersServicer(Base):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def WaitBarrier(self, request: pb.WaitBarrierRequest, context: Any) -> pb.WaitBarrierResponse:
        response: pb.WaitBarrierResponse = await answer(self._calls, "wait_barrier", request, context)
        return response

    async def ListBarriers(self, request: pb.ListBarriersRequest, context: Any) -> pb.ListBarriersResponse:
        response: pb.ListBarriersResponse = await answer(self._calls, "list_barriers", request, context)
        return response
