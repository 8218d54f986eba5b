"""Checkpoints: the catalog."""

from __future__ import annotations

from typing import Any

from strata.coordinator.servicers.answering import Desk, answer
from strata.v1 import checkpoints_pb2 as pb
from strata.v1 import retention_pb2 as retention_pb
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

    async def HoldSaves(self, request: pb.HoldSavesRequest, context: Any) -> pb.HoldSavesResponse:
        response: pb.HoldSavesResponse = await answer(self._desk, "hold_saves", request, context)
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

    async def TagCheckpoint(self, request: pb.TagCheckpointRequest, context: Any) -> pb.TagCheckpointResponse:
        response: pb.TagCheckpointResponse = await answer(self._desk, "tag_checkpoint", request, context)
        return response

    async def UntagCheckpoint(
        self, request: pb.UntagCheckpointRequest, context: Any
    ) -> pb.UntagCheckpointResponse:
        response: pb.UntagCheckpointResponse = await answer(self._desk, "untag_checkpoint", request, context)
        return response

    async def OpenCheckpoint(
        self, request: pb.OpenCheckpointRequest, context: Any
    ) -> pb.OpenCheckpointResponse:
        response: pb.OpenCheckpointResponse = await answer(self._desk, "open_checkpoint", request, context)
        return response

    async def CloseCheckpoint(
        self, request: pb.CloseCheckpointRequest, context: Any
    ) -> pb.CloseCheckpointResponse:
        response: pb.CloseCheckpointResponse = await answer(self._desk, "close_checkpoint", request, context)
        return response

    async def ReportCopy(self, request: pb.ReportCopyRequest, context: Any) -> pb.ReportCopyResponse:
        response: pb.ReportCopyResponse = await answer(self._desk, "report_copy", request, context)
        return response

    async def ReportDamage(self, request: pb.ReportDamageRequest, context: Any) -> pb.ReportDamageResponse:
        response: pb.ReportDamageResponse = await answer(self._desk, "report_damage", request, context)
        return response

    async def ListChores(self, request: pb.ListChoresRequest, context: Any) -> pb.ListChoresResponse:
        response: pb.ListChoresResponse = await answer(self._desk, "list_chores", request, context)
        return response

    async def AdoptCheckpoint(
        self, request: pb.AdoptCheckpointRequest, context: Any
    ) -> pb.AdoptCheckpointResponse:
        response: pb.AdoptCheckpointResponse = await answer(self._desk, "adopt_checkpoint", request, context)
        return response

    async def SetRetention(
        self, request: retention_pb.SetRetentionRequest, context: Any
    ) -> retention_pb.SetRetentionResponse:
        response: retention_pb.SetRetentionResponse = await answer(
            self._desk, "set_retention", request, context
        )
        return response

    async def GetRetention(
        self, request: retention_pb.GetRetentionRequest, context: Any
    ) -> retention_pb.GetRetentionResponse:
        response: retention_pb.GetRetentionResponse = await answer(
            self._desk, "get_retention", request, context
        )
        return response

    async def ForkCheckpoint(
        self, request: pb.ForkCheckpointRequest, context: Any
    ) -> pb.ForkCheckpointResponse:
        response: pb.ForkCheckpointResponse = await answer(self._desk, "fork_checkpoint", request, context)
        return response

    async def RewindJob(self, request: pb.RewindJobRequest, context: Any) -> pb.RewindJobResponse:
        response: pb.RewindJobResponse = await answer(self._desk, "rewind_job", request, context)
        return response
