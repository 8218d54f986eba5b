"""Garbage collection and verification of a job's checkpoints, done on one host (PROTOCOLS 8.6, 8.8).

The coordinators mark checkpoints for deletion, and request the verification of copies that a host reported damaged.
Processes that have the bytes request the tasks: rank 0 after each commit, and one process of each host when a
corruption report comes in. A task does no harm if it is done twice, by several processes, or late.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from google.protobuf.message import Message

from strata.checkpoint.format.chunk_map import objects_in
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import committed
from strata.checkpoint.restore.verify import look
from strata.checkpoint.storage.removal import remove_objects
from strata.checkpoint.storage.sink import Storage
from strata.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    QuotaExceeded,
    Refused,
    StorageError,
    StrataError,
    Unavailable,
)
from strata.v1.checkpoints_pb2 import (
    MAINTENANCE_KIND_CLEAR,
    MAINTENANCE_KIND_VERIFY,
    AdoptCheckpointRequest,
    DeleteCheckpointRequest,
    ListMaintenanceRequest,
    MaintenanceTask,
    ReportDamageRequest,
)
from strata.wire.pages import whole

POLL_S: Final = 0.05
"""Seconds between two requests while rank 0 waits for the leader to mark checkpoints for deletion."""

Ask = Callable[[Message], Any]
"""Sends a request of the job and returns the response; raises `Unavailable` if no response comes in time."""

log: Final = logging.getLogger("strata.checkpoint")


class Maintenance:
    """This host's maintenance of the checkpoints of `job` in `storages`.

    `first` is called before each pass.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        job: str,
        host: str,
        storages: Sequence[Storage],
        first: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask = ask
        self._first = first
        self._job = job
        self._host = host
        self._storages = tuple(storages)
        self._busy = threading.Lock()
        self._waking = threading.Lock()
        self._again = False
        self._worker: threading.Thread | None = None

    def collect_garbage(self, *, marked_within_s: float = 0.0) -> None:
        """Do the removals that are due; with `marked_within_s`, also removals that the leader marks in that time.

        A failed removal does not stop the others; the first such error is raised at the end. If no coordinator
        answers, the next pass does the removals.
        """
        deadline = time.monotonic() + marked_within_s
        failure: StorageError | None = None
        done: set[bytes] = set()
        with self._busy:
            try:
                self._first()
                while True:
                    answer = whole(self._ask, ListMaintenanceRequest(job=self._job, host=self._host))
                    for task in answer.tasks:
                        name = task.SerializeToString()
                        if name not in done and task.kind != MAINTENANCE_KIND_VERIFY:
                            done.add(name)
                            failure = self._attempt(task) or failure
                    if not answer.pending or time.monotonic() >= deadline:
                        break
                    time.sleep(POLL_S)
            except (Unavailable, QuotaExceeded) as error:
                log.warning("old checkpoints stay for now: %s", error.message)
        if failure is not None:
            raise failure

    def soon(self) -> None:
        """Request and do the tasks in a separate thread; if that thread is already running, it makes one more pass.

        If no thread can be started, for example because the process is exiting, the next call does the tasks.
        """
        with self._waking:
            self._again = True
            if self._worker is None or not self._worker.is_alive():
                worker = threading.Thread(target=self._passes, name="strata-maintenance", daemon=True)
                with contextlib.suppress(RuntimeError):
                    worker.start()
                    self._worker = worker

    def close(self, timeout_s: float) -> None:
        """Wait for the thread, if it is running; the next process does the remaining tasks."""
        with self._waking:
            worker = self._worker
        if worker is not None:
            worker.join(timeout_s)

    def _passes(self) -> None:
        while True:
            with self._waking:
                if not self._again:
                    self._worker = None
                    return
                self._again = False
            self._pass()

    def look(self) -> None:
        """Verify the objects that other hosts reported damaged; a result that is not sent waits for the next pass."""
        for task in whole(self._ask, ListMaintenanceRequest(job=self._job, host=self._host)).tasks:
            if task.kind == MAINTENANCE_KIND_VERIFY:
                self._attempt(task)

    def _pass(self) -> None:
        try:
            self.look()
            self.collect_garbage()
        except StorageError as error:
            log.warning("a maintenance task is left: %s", error.message)
        except StrataError as error:  # the generation ended, or the job was deleted
            log.debug("no maintenance: %s", error.message)

    # -- one task

    def _attempt(self, task: MaintenanceTask) -> StorageError | None:
        found = next((s for s in self._storages if task.path.startswith(_root(s))), None)
        if found is None:
            return None  # the checkpoint is in another storage: a process with that storage does the task
        folder = task.path.removeprefix(_root(found))
        try:
            if task.kind == MAINTENANCE_KIND_VERIFY:
                self._verify(task, found, folder)
            elif task.kind != MAINTENANCE_KIND_CLEAR or self._may_clear(task, found, folder):
                self._remove(task, found, folder)
        except StorageError as error:
            log.warning("step %d cannot be removed: %s", task.step, error.message)
            return error
        except (Unavailable, QuotaExceeded):
            raise
        except (Refused, CheckpointNotFound) as error:
            log.debug("step %d stays: %s", task.step, error.message)
        except StrataError as error:
            log.warning("a maintenance task of step %d is left: %s", task.step, error.message)
        return None

    def _remove(self, task: MaintenanceTask, storage: Storage, folder: str) -> None:
        remove_objects(storage, folder)
        self._delete(task, finished=True)
        log.info("step %d is deleted: %s", task.step, task.path)

    def _delete(self, task: MaintenanceTask, *, finished: bool) -> None:
        self._ask(
            DeleteCheckpointRequest(
                job=self._job,
                step=task.step,
                attempt=task.attempt,
                finished=finished,
                tier=task.tier if finished else "",
                host=self._host if finished else "",
            )
        )

    def _may_clear(self, task: MaintenanceTask, storage: Storage, folder: str) -> bool:
        """Return whether an aborted save may be removed. If the save's marker proves a commit, the coordinators
        adopt the checkpoint instead.

        A missing record is no error: another attempt at the same step may have replaced it.
        """
        if not storage.exists(f"{folder}/{MARKER}"):
            with contextlib.suppress(CheckpointNotFound):
                self._delete(task, finished=False)
            return True
        try:
            proven = committed(storage, folder)
        except CheckpointCorrupt as error:
            log.error("step %d was given up, and is marked as committed: %s", task.step, error.message)  # noqa: TRY400  # the reason says it all
            return False
        if proven is not None:
            manifest, digest = proven
            log.error("step %d was given up, and storage has it as committed: %s", task.step, task.path)
            self._ask(
                AdoptCheckpointRequest(
                    job=self._job,
                    step=task.step,
                    attempt=task.attempt,
                    manifest_digest=digest,
                    size_bytes=manifest.size_bytes,
                    model_hash=manifest.model_hash,
                )
            )
        return False

    def _verify(self, task: MaintenanceTask, storage: Storage, folder: str) -> None:
        """Read the object that another host reported damaged, and report the result.

        An unreadable object (missing, or in a storage that is not mounted) does not confirm the damage. The hosts
        that wait for this result receive the reason.
        """
        try:
            if not storage.exists(folder):
                raise StorageError(f"{storage.uri} has nothing of it on this host")
            complaint = look(storage, folder, manifest_digest=task.manifest_digest, only=task.object)
        except (StorageError, CheckpointError) as error:
            log.warning(
                "step %d, which another host found damaged, cannot be read: %s", task.step, error.message
            )
            self._report(task, reason=error.message, unread=True)
            return
        log.log(
            logging.ERROR if complaint else logging.WARNING,
            "step %d, which another host found damaged, is %s",
            task.step,
            complaint or "sound here",
        )
        found = next(iter(objects_in(complaint)), "") if complaint else task.object
        self._report(task, reason=complaint, sound=not complaint, object=found)

    def _report(self, task: MaintenanceTask, **found: Any) -> None:
        self._ask(
            ReportDamageRequest(
                job=self._job,
                step=task.step,
                attempt=task.attempt,
                tier=task.tier,
                host=self._host,
                **found,
            )
        )


def _root(storage: Storage) -> str:
    return f"{storage.uri.rstrip('/')}/"
