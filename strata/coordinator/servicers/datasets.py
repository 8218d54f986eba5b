"""Datasets: which there are, and whose shards are whose."""

from __future__ import annotations

from typing import Any

from strata.coordinator.servicers.answering import Desk, answer
from strata.v1 import datasets_pb2 as pb
from strata.v1.datasets_pb2_grpc import DatasetsServicer as Base

# ruff: noqa: N802  # the names are the RPCs'


class DatasetsServicer(Base):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def RegisterDataset(
        self, request: pb.RegisterDatasetRequest, context: Any
    ) -> pb.RegisterDatasetResponse:
        response: pb.RegisterDatasetResponse = await answer(self._desk, "register_dataset", request, context)
        return response

    async def GetAssignment(self, request: pb.GetAssignmentRequest, context: Any) -> pb.GetAssignmentResponse:
        response: pb.GetAssignmentResponse = await answer(self._desk, "get_assignment", request, context)
        return response

    async def ListDatasets(self, request: pb.ListDatasetsRequest, context: Any) -> pb.ListDatasetsResponse:
        response: pb.ListDatasetsResponse = await answer(self._desk, "list_datasets", request, context)
        return response
