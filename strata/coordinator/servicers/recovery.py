"""Recovery: where a worker goes on from."""

from __future__ import annotations

from typing import Any

from strata.coordinator.servicers.answering import Desk, answer
from strata.v1 import recovery_pb2 as pb
from strata.v1.recovery_pb2_grpc import RecoveryServicer as Base

# ruff: noqa: N802  # the names are the RPCs'


class RecoveryServicer(Base):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def GetRecovery(self, request: pb.RecoveryRequest, context: Any) -> pb.RecoveryResponse:
        response: pb.RecoveryResponse = await answer(self._desk, "get_recovery", request, context)
        return response
