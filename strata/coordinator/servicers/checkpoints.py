"""Checkpoints: the catalog."""

from __future__ import annotations

from typing import Any

from strata.coordinator.servicers.answering import Desk, answer
from strata.v1 import checkpoints_pb2 as pb
from strata.v1.checkpoints_pb2_grpc import CheckpointsServicer as Base

# ruff: noqa: N802  # the names are the RPCs'


class CheckpointsServicer(Base):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def BeginCheckpoint(
        self, request: pb.BeginCheckpointRequest, context: Any
    ) -> pb.BeginCheckpointResponse:
        response: pb.BeginCheckpointResponse = await answer(self._desk, "begin_checkpoint", request, context)
        return response

    async def AckCheckpoint(self, request: pb.AckCheckpointRequest, context: Any) -> pb.AckCheckpointResponse:
        response: pb.AckCheckpointResponse = await answer(self._desk, "ack_checkpoint", request, context)
        return response

    async def SealCheckpoint(
        self, request: pb.SealCheckpointRequest, context: Any
    ) -> pb.SealCheckpointResponse:
        response: pb.SealCheckpointResponse = await answer(self._desk, "seal_checkpoint", request, context)
        return response

    async def AbortCheckpoint(
        self, request: pb.AbortCheckpointRequest, context: Any
    ) -> pb.AbortCheckpointResponse:
        response: pb.AbortCheckpointResponse = await answer(self._desk, "abort_checkpoint", request, context)
        return response

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Any) -> pb.GetCheckpointResponse:
        response: pb.GetCheckpointResponse = await answer(self._desk, "get_checkpoint", request, context)
        return response

    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, context: Any
    ) -> pb.ListCheckpointsResponse:
        response: pb.ListCheckpointsResponse = await answer(self._desk, "list_checkpoints", request, context)
        return response

    async def PinCheckpoint(self, request: pb.PinCheckpointRequest, context: Any) -> pb.PinCheckpointResponse:
        response: pb.PinCheckpointResponse = await answer(self._desk, "pin_checkpoint", request, context)
        return response

    async def UnpinCheckpoint(
        self, request: pb.UnpinCheckpointRequest, context: Any
    ) -> pb.UnpinCheckpointResponse:
        response: pb.UnpinCheckpointResponse = await answer(self._desk, "unpin_checkpoint", request, context)
        return response

    async def DeleteCheckpoint(
        self, request: pb.DeleteCheckpointRequest, context: Any
    ) -> pb.DeleteCheckpointResponse:
        response: pb.DeleteCheckpointResponse = await answer(
            self._desk, "delete_checkpoint", request, context
        )
        return response
