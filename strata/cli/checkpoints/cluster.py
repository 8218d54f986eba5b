"""Checkpoints of a job, as the coordinators' catalog records them.

The catalog records which checkpoints exist and which may be deleted. It may be that this host cannot reach
their objects.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import uuid
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, Final

from tenacity import retry, retry_if_exception_type, stop_after_attempt

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.storage import root
from strata.checkpoint.storage.removal import remove_objects
from strata.checkpoint.storage.sink import Storage
from strata.cli.checkpoints.garbage import Garbage
from strata.cli.checkpoints.root_listing import open_storage
from strata.cli.console.output import message_as_dict
from strata.client import CoordinatorClient
from strata.client.checkpoints.catalog import metadata_of
from strata.client.checkpoints.reader_lease import ReaderLease
from strata.errors import (
    CheckpointError,
    CheckpointNotFound,
    Conflict,
    InvalidArgument,
    Refused,
    StorageError,
)
from strata.v1.checkpoints_pb2 import (
    MAINTENANCE_KIND_CLEAR,
    MAINTENANCE_KIND_REMOVE,
    Checkpoint,
    DeleteCheckpointRequest,
    ForkCheckpointRequest,
    ListMaintenanceRequest,
    MaintenanceTask,
    PinCheckpointRequest,
    RewindJobRequest,
    TagCheckpointRequest,
    UnpinCheckpointRequest,
    UntagCheckpointRequest,
)
from strata.v1.retention_pb2 import (
    GetRetentionRequest,
    GetRetentionResponse,
    Keep,
    Retention,
    SetRetentionRequest,
)

_WHY: Final[dict[int, str]] = {
    MAINTENANCE_KIND_REMOVE: "it is to be deleted",
    MAINTENANCE_KIND_CLEAR: "its save was given up",
}


KEEP_TRIES: Final = 8
"""How often to try to set the rules if another operator sets rules at the same time."""


class ClusterSource:
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
            self.client.job_status()  # raises NotFound if the job does not exist
        self._messages = {message.attempt: message for message in listed}
        return sorted(map(metadata_of, listed), key=lambda c: c.order)

    def place(self, checkpoint: CheckpointMetadata) -> tuple[Storage, str]:
        """Return the first copy that this host can reach."""
        message = self._messages.get(checkpoint.id)
        tiers = [tier.path for tier in message.tiers] if message is not None else []
        unreached: StorageError | None = None
        for path in dict.fromkeys([checkpoint.path, *tiers]):
            try:
                return place_of(path, checkpoint.id)
            except StorageError as error:
                unreached = unreached or error
        assert unreached is not None
        raise unreached

    def reading(self, checkpoint: CheckpointMetadata) -> contextlib.AbstractContextManager[object]:
        return contextlib.closing(
            ReaderLease(
                self.client.call,
                job=self.client.job,
                step=checkpoint.step,
                attempt=checkpoint.id,
                reader=uuid.uuid4().hex,
                who=f"strata checkpoints ({socket.gethostname()})",
            )
        )

    def values(self, checkpoint: CheckpointMetadata) -> dict[str, Any]:
        return message_as_dict(self._messages[checkpoint.id])

    # -- pins, tags, forks

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

    def tag(self, checkpoint: CheckpointMetadata, name: str, *, who: str) -> None:
        self.client.call(
            TagCheckpointRequest(
                job=self.client.job, tag=name, step=checkpoint.step, attempt=checkpoint.id, who=who
            )
        )

    def untag(self, name: str) -> None:
        self.client.call(UntagCheckpointRequest(job=self.client.job, tag=name))

    def tags(self) -> Collection[str]:
        return {name for checkpoint in self.all() for name in checkpoint.tags}

    def fork(self, checkpoint: CheckpointMetadata, job: str) -> str:
        """Let another job, which has no generation yet, begin from a checkpoint of this job; return its path."""
        request = ForkCheckpointRequest(
            job=job, source_job=self.client.job, step=checkpoint.step, attempt=checkpoint.id
        )
        path: str = self.client.call(request).checkpoint.path
        return path

    # -- retention and rewind

    def rules(self) -> GetRetentionResponse:
        """Return the job's retention policy, and which checkpoints it keeps and deletes."""
        answer: GetRetentionResponse = self.client.call_whole(GetRetentionRequest(job=self.client.job))
        return answer

    @retry(retry=retry_if_exception_type(Conflict), stop=stop_after_attempt(KEEP_TRIES), reraise=True)
    def keep(self, keep: Keep, *, tier: str, who: str) -> None:
        """Set the rules for all tiers or for one tier; the policy's other rules stay.

        If another operator sets other rules meanwhile, those rules stay too. Raise `Conflict` after `KEEP_TRIES` such
        collisions.
        """
        found = self.rules()
        after = Retention(keep=found.retention.keep if tier else keep, who=who)
        for name, rules in found.retention.tiers.items():
            after.tiers[name].CopyFrom(rules)
        if tier:
            after.tiers[tier].CopyFrom(keep)
        self.client.call(
            SetRetentionRequest(job=self.client.job, retention=after, if_revision=found.revision)
        )

    def generation(self) -> int:
        """Return the job's current generation, 0 before the first."""
        return self.client.job_status().world.generation

    def rewind(self, checkpoint: CheckpointMetadata, *, generation: int, who: str) -> None:
        """Let the next generation begin from a checkpoint."""
        self.client.call(
            RewindJobRequest(
                job=self.client.job,
                step=checkpoint.step,
                attempt=checkpoint.id,
                generation=generation,
                who=who,
            )
        )

    # -- deletion

    def remove(self, checkpoint: CheckpointMetadata) -> None:
        """Forbid the use of a checkpoint, and remove the copies that this host reaches; other hosts remove
        their copies.
        """
        self.client.call(
            DeleteCheckpointRequest(job=self.client.job, step=checkpoint.step, attempt=checkpoint.id)
        )
        for task in self._tasks():
            if task.attempt == checkpoint.id:
                self._do(task)

    def garbage(self, keep_count: int | None) -> Iterator[Garbage]:
        if keep_count is not None:
            raise InvalidArgument(
                "the CheckpointManagers of a job set its retention, and the leader applies it",
                hint="give keep_count to CheckpointManager, or --storage here",
            )
        for task in self._tasks():
            try:
                place_of(task.path, task.attempt)
            except StorageError as error:
                sys.stderr.write(f"step {task.step} is left to other hosts: {error.message}\n")
                continue
            if task.kind not in _WHY:
                continue  # the job's members verify copies that have a corruption report
            yield Garbage(
                what=f"step {task.step}, generation {task.generation}, attempt {task.attempt} at {task.path}",
                why=_WHY[task.kind],
                remove=partial(self._do, task),
            )

    def _tasks(self) -> list[MaintenanceTask]:
        request = ListMaintenanceRequest(job=self.client.job, host=socket.gethostname())
        return list(self.client.call_whole(request).tasks)

    def _do(self, task: MaintenanceTask) -> None:
        """Remove a copy's objects and report that; raise `Refused` if storage marks an aborted save as committed."""
        storage, folder = place_of(task.path, task.attempt)
        if task.kind == MAINTENANCE_KIND_CLEAR:
            if storage.exists(f"{folder}/{MARKER}"):
                raise Refused(f"it was given up, and storage has it as committed: {task.path}")
            with contextlib.suppress(CheckpointNotFound):  # another attempt now has this step and generation
                self._delete(task, finished=False)
        remove_objects(storage, folder)
        self._delete(task, finished=True)

    def _delete(self, task: MaintenanceTask, *, finished: bool) -> None:
        self.client.call(
            DeleteCheckpointRequest(
                job=self.client.job,
                step=task.step,
                attempt=task.attempt,
                finished=finished,
                tier=task.tier if finished else "",
                host=socket.gethostname() if finished else "",
            )
        )


def place_of(path: str, attempt: str) -> tuple[Storage, str]:
    """Return the storage and the folder of a record's path; raise `StorageError` if this host cannot reach them.

    If the root exists but the folder does not, the objects were removed already; that is no error.
    """
    above, _, folder = path.rpartition("/")
    if not folder.startswith("step-") or not folder.endswith(f"-{attempt}"):
        raise CheckpointError(f"attempt {attempt} is recorded at {path}, which is not its folder")
    storage = open_storage(above)
    if root.owner_of(storage) is None:
        raise StorageError(
            f"this host has nothing at {above}", hint="run it where that path is mounted, or pass --storage"
        )
    return storage, folder
