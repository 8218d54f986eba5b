"""Recovery: where a worker goes on from."""

from __future__ import annotations

from typing import Any

from strata.coordinator.calls.dispatch import Calls
from strata.coordinator.servicers.answering import answer
from strata.v1 import recovery_pb2 as pb
from strata.v1.recovery_pb2_grpc import RecoveryServicer as Base

# ruff: noqa: N802  # the names are the RPCs'


class RecoveryServicer(Base):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def GetRecovery(self, request: pb.RecoveryRequest, context: Any) -> pb.RecoveryResponse:
        response: pb.RecoveryResponse = await answer(self._calls, "get_recovery", request, context)
        return response
