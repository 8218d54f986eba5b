"""The shelf of a job, whose catalog the coordinators keep."""

from __future__ import annotations

from typing import Any

from strata.checkpoint.catalog import CheckpointMetadata
from strata.checkpoint.sink import Storage
from strata.cli.checkpoints.where import place_of, whoever
from strata.cli.output import message_as_dict
from strata.client import CoordinatorClient
from strata.client.checkpoint_catalog import metadata_of
from strata.v1.checkpoints_pb2 import (
    Checkpoint,
    DeleteCheckpointRequest,
    ForkCheckpointRequest,
    PinCheckpointRequest,
    TagCheckpointRequest,
    UnpinCheckpointRequest,
    UntagCheckpointRequest,
)


class ClusterShelf:
    """The checkpoints in the catalog of the client's job."""

    def __init__(self, client: CoordinatorClient) -> None:
        self.client = client
        self._messages: dict[str, Checkpoint] = {}

    @property
    def title(self) -> str:
        return f"job {self.client.job}"

    def all(self) -> list[CheckpointMetadata]:
        listed = self.client.checkpoints()
        if not listed:
            self.client.job_status()  # a job that does not exist is said to be missing, not empty
        self._messages = {message.attempt: message for message in listed}
        return sorted(map(metadata_of, listed), key=lambda c: c.order)

    def place(self, checkpoint: CheckpointMetadata) -> tuple[Storage, str]:
        return place_of(checkpoint)

    def values(self, checkpoint: CheckpointMetadata) -> dict[str, Any]:
        return message_as_dict(self._messages[checkpoint.id])

    def pin(self, checkpoint: CheckpointMetadata, *, who: str, why: str) -> None:
        self.client.call(
            PinCheckpointRequest(
                job=self.client.job, step=checkpoint.step, attempt=checkpoint.id, who=who, why=why
            )
        )

    def unpin(self, checkpoint: CheckpointMetadata) -> None:
        self.client.call(
            UnpinCheckpointRequest(job=self.client.job, step=checkpoint.step, attempt=checkpoint.id)
        )

    def tag(self, checkpoint: CheckpointMetadata, name: str) -> None:
        self.client.call(
            TagCheckpointRequest(
                job=self.client.job, tag=name, step=checkpoint.step, attempt=checkpoint.id, who=whoever()
            )
        )

    def untag(self, name: str) -> None:
        self.client.call(UntagCheckpointRequest(job=self.client.job, tag=name))

    def fork(self, checkpoint: CheckpointMetadata, job: str) -> str:
        """Let a job that has not begun yet begin from a checkpoint of this one; return its path."""
        request = ForkCheckpointRequest(
            job=job, source_job=self.client.job, step=checkpoint.step, attempt=checkpoint.id
        )
        path: str = self.client.call(request).checkpoint.path
        return path

    def delete(self, checkpoint: CheckpointMetadata) -> None:
        self._delete(checkpoint, finished=False)

    def deleted(self, checkpoint: CheckpointMetadata) -> None:
        self._delete(checkpoint, finished=True)

    def _delete(self, checkpoint: CheckpointMetadata, *, finished: bool) -> None:
        self.client.call(
            DeleteCheckpointRequest(
                job=self.client.job, step=checkpoint.step, attempt=checkpoint.id, finished=finished
            )
        )
