"""`AsyncCheckpointWriter`: saves that cost the trainer one copy of the state.

`write` copies the state into an arena and returns; one thread takes the saves in turn to disk and
to the catalog. There are two arenas, so at most two saves are in flight: a third `write` blocks
until the first has ended. Nothing is dropped.

An error is never lost: it is raised by `info.wait()`, else by the next `write`, by
`check_for_errors`, `wait_until_finished` or `close`, else it is logged when the process exits.
So is an error of what follows a save (the removal of old checkpoints).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from strata.checkpoint import rng
from strata.checkpoint.catalog import CheckpointMetadata, SaveRequest
from strata.checkpoint.handle import CheckpointInfo, Progress
from strata.checkpoint.saving import Saver
from strata.checkpoint.snapshot import Arena, Snapshot, take_snapshot
from strata.checkpoint.state import Flat
from strata.errors import ConfigError, Unavailable

MAX_IN_FLIGHT: Final = 2
RNG_KEY: Final = "__rng__"

log: Final = logging.getLogger("strata.checkpoint")

AfterSave = Callable[[CheckpointMetadata | None], None]
"""Called by the writing thread after each save, with the checkpoint or None when it failed."""


class AsyncCheckpointWriter:
    """Writes one rank's states in the background. One user thread, one process.

    `failing_patience_s` bounds how long a program that ends with an error waits for a save that
    makes no progress: the other ranks may never come to it. None: there are no others.
    """

    def __init__(
        self,
        saver: Saver,
        *,
        after_save: AfterSave | None = None,
        failing_patience_s: float | None = None,
    ) -> None:
        self._saver = saver
        self._after_save = after_save
        self._failing_patience_s = failing_patience_s
        self._pid = os.getpid()
        self._arenas: queue.SimpleQueue[Arena] = queue.SimpleQueue()
        for _ in range(MAX_IN_FLIGHT):
            self._arenas.put(Arena())
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._in_flight = 0
        self._infos: list[CheckpointInfo] = []
        self._troubles: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._failed_attempts: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def write(
        self,
        state: Any,
        request: SaveRequest,
        *,
        capture_rng: bool = True,
        progress: Progress | None = None,
    ) -> CheckpointInfo:
        """Copy `state` and return at once; raise the error of an earlier save first.

        `state` is a mapping of what is to be saved, or bytes. It blocks while two saves are in
        flight. `CheckpointError`, naming the key, for what cannot be saved.
        """
        self._check_process()
        if self._closed:
            raise ConfigError("the checkpoint manager is closed")
        self.check_for_errors()
        flat = Flat()
        tree = flat.add("", state)
        generators = flat.add(RNG_KEY, rng.capture()) if capture_rng else None
        info = CheckpointInfo(
            step=request.step,
            epoch=request.epoch,
            checkpoint_type=request.type,
            metadata=request.metadata,
            progress=progress,
        )
        arena = self._arenas.get()
        try:
            snapshot = take_snapshot(flat, tree=tree, rng=generators, arena=arena)
        except BaseException:
            self._arenas.put(arena)
            raise
        info.bytes_total = snapshot.layout.size_bytes
        info.staged = True
        self._infos = [i for i in self._infos if i.unreported or not i.done]
        self._infos.append(info)
        with self._idle:
            self._in_flight += 1
        self._start()
        self._jobs.put(_Job(info=info, snapshot=snapshot, request=request, arena=arena))
        return info

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Return once no save is in flight; raise the error of one that failed.

        `Unavailable` after `timeout_s`; the saves go on.
        """
        self._check_process()
        if not self._settle(timeout_s):
            raise Unavailable(f"{self._in_flight} saves are not done after {timeout_s:g} s", hint="")
        self.check_for_errors()

    @property
    def idle(self) -> bool:
        """Whether no save is in flight."""
        with self._idle:
            return self._in_flight == 0

    def settle(self) -> None:
        """Return once no save is in flight, whatever became of them."""
        self._check_process()
        self._settle(None)

    def check_for_errors(self) -> None:
        """Raise the error of a save that failed, unless it was raised before."""
        failed = [info for info in self._infos if info.unreported]
        self._infos = [info for info in self._infos if not info.done]
        for other in failed[1:]:
            other.note_in(failed[0])
        if failed:
            failed[0].raise_error()
        with contextlib.suppress(queue.Empty):
            raise self._troubles.get_nowait()

    def close(self, *, failing: bool = False) -> None:
        """Wait for the saves in flight, stop the thread, and raise the error of one that failed.

        `failing`: the program ends with an error of its own, so it waits no longer than it may.
        """
        if self._closed:
            return
        self._check_process()
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._thread is not None:
            if not self._settle(self._failing_patience_s if failing else None, while_progressing=True):
                raise Unavailable(f"{self._in_flight} saves were left unfinished", hint="")
            self._jobs.put(None)
            self._thread.join()
        self.check_for_errors()

    # -- the thread

    def _start(self) -> None:
        if self._thread is None:
            # a daemon: an idle writer keeps no program alive; _at_exit waits for a busy one
            self._thread = threading.Thread(target=self._run, name="strata-checkpoints", daemon=True)
            self._thread.start()
            atexit.register(self._at_exit)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            record, arena = self._save(job), job.arena
            del job
            self._arenas.put(arena)
            if self._after_save is not None:
                try:
                    self._after_save(record)
                except BaseException as error:  # noqa: BLE001  # raised in the user's thread
                    self._troubles.put(error)
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()

    def _save(self, job: _Job) -> CheckpointMetadata | None:
        info, step = job.info, job.request.step
        request = dataclasses.replace(job.request, replaces=self._failed_attempts.get(step, ""))
        try:
            record = self._saver.save(job.snapshot, request, info)
        except BaseException as error:  # noqa: BLE001  # raised in the user's thread, by its handle
            if info.record is not None:
                self._failed_attempts[step] = info.record.id
            info.fail(error)
        else:
            self._failed_attempts.pop(step, None)
            info.succeed(record)
            log.info("step %d is committed: %s, %d bytes", step, record.path, record.size_bytes)
            return record
        log.error("the save of step %d failed: %s", step, str(info.error) or type(info.error).__name__)
        return None

    def _settle(self, timeout_s: float | None, *, while_progressing: bool = False) -> bool:
        """Tell whether no save is in flight any more; wait for it, anew after each progress."""
        while True:
            before = [info.bytes_written for info in self._infos]
            with self._idle:
                if self._idle.wait_for(lambda: self._in_flight == 0, timeout_s):
                    return True
            if not while_progressing or before == [info.bytes_written for info in self._infos]:
                return False

    # -- the end of the process

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        failing = hasattr(sys, "last_value")  # an exception ends the program
        if not self._settle(self._failing_patience_s if failing else None, while_progressing=True):
            unfinished = [info.step for info in self._infos if not info.done]
            log.error("the process ends before these steps are saved: %s", unfinished)
        for info in self._infos:
            if info.unreported:
                log.error("nobody was told that the save of step %d failed: %s", info.step, info.error)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"process {os.getpid()} was forked from {self._pid}, whose checkpoints it cannot write",
                hint="save in the parent, or make a manager in the child",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A snapshot on its way, and the arena it lies in."""

    info: CheckpointInfo
    snapshot: Snapshot
    request: SaveRequest
    arena: Arena
