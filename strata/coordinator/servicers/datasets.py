"""Datasets: which there are, and whose shards are whose."""

from __future__ import annotations

from typing import Any

from strata.coordinator.calls.dispatch import Calls
from strata.coordinator.servicers.answering import answer
from strata.v1 import datasets_pb2 as pb
from strata.v1.datasets_pb2_grpc import DatasetsServicer as Base

# ruff: noqa: N802  # the names are the RPCs'


class DatasetsServicer(Base):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def RegisterDataset(
        self, request: pb.RegisterDatasetRequest, context: Any
    ) -> pb.RegisterDatasetResponse:
        response: pb.RegisterDatasetResponse = await answer(self._calls, "register_dataset", request, context)
        return response

    async def GetAssignment(self, request: pb.GetAssignmentRequest, context: Any) -> pb.GetAssignmentResponse:
        response: pb.GetAssignmentResponse = await answer(self._calls, "get_assignment", request, context)
        return response

    async def ListDatasets(self, request: pb.ListDatasetsRequest, context: Any) -> pb.ListDatasetsResponse:
        response: pb.ListDatasetsResponse = await answer(self._calls, "list_datasets", request, context)
        return response
