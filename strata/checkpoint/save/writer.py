"""`AsyncCheckpointWriter`: saves that cost the trainer one copy of the state.

`write` copies the state into an arena (reused memory) and returns. One thread takes the saves in turn to storage and
to the catalog. There are two arenas, so at most two saves are in flight; `WhenFull` decides about a third one. With
`low_memory` there is no arena: `write` returns when the state is written.

An error is never lost. `info.wait()` raises it; else the next `write`, `check_for_errors`, `wait_until_finished` or
`close` does; else the process prints it on stderr when it exits. This applies also to errors of work after a save
(the removal of old checkpoints). A dropped save is not such an error: it is logged, and only its `info.wait()` raises.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.save.handle import CheckpointInfo, Progress
from strata.checkpoint.save.pending_errors import PendingErrors, print_on_stderr
from strata.checkpoint.save.replicated_tensors import RNG_KEY, Replication
from strata.checkpoint.save.retry import HoldOver
from strata.checkpoint.save.saver import DROPPED, Saver
from strata.checkpoint.snapshot import rng
from strata.checkpoint.snapshot.cuda_copies import CudaCopies, optimizers_in
from strata.checkpoint.snapshot.memory import allocate
from strata.checkpoint.snapshot.snapshot import Arena, Snapshot, image_bytes, look_at, take_snapshot
from strata.checkpoint.snapshot.state import Flat
from strata.checkpoint.snapshot.tensors import COPY_THREADS
from strata.core.kv.records import CheckpointType
from strata.errors import CheckpointAborted, CheckpointError, ConfigError, StrataError, Unavailable

MAX_IN_FLIGHT: Final = 2
REPORT_INTERVAL_S: Final = 10.0
"""The interval of the log line about unfinished saves while the program exits."""

_TO_FREE_A_BUFFER: Final = f"{DROPPED} to make room"

log: Final = logging.getLogger("strata.checkpoint")

AfterSave = Callable[[CheckpointMetadata | None], None]
"""Called by the writing thread after each save, with the checkpoint, or None if the save failed."""


class WhenFull(StrEnum):
    """The behaviour of a save when two are in flight already.

    BLOCK: wait until one has ended. DROP: take the arena of the save that has not begun, and abort that save for
    all ranks. FAIL: raise, and abort the new save for all ranks.
    """

    BLOCK = "block"
    DROP = "drop"
    FAIL = "fail"


class AsyncCheckpointWriter:
    """Writes one rank's states in the background, for one thread of one process.

    A program that ends with an error waits at most `failing_grace_s` for a save without progress, because the
    other ranks may never reach that save. None: no limit, because there are no other ranks.
    """

    def __init__(
        self,
        saver: Saver,
        *,
        after_save: AfterSave | None = None,
        failing_grace_s: float | None = None,
        when_full: WhenFull = WhenFull.BLOCK,
        low_memory: bool = False,
    ) -> None:
        self._saver = saver
        self._after_save = after_save
        self._failing_grace_s = failing_grace_s
        self._when_full = when_full
        self._low_memory = low_memory
        self._pid = os.getpid()
        self._changed = threading.Condition()
        """Guards the arenas, the queue and the counter declared below; notified at each change."""
        self._cuda = CudaCopies()
        self._arenas = [Arena() for _ in range(MAX_IN_FLIGHT)]
        self._waiting: deque[_Job | _Failed] = deque()
        self._in_flight = 0
        self._ending = False
        self._failed_attempts: dict[int, str] = {}
        self._pending_errors = PendingErrors()
        self._ignores_errors_once = False
        self._thread: threading.Thread | None = None
        self._closed = False
        self._exiting = False

    def prepare(self, state: Any, *, capture_rng: bool = True) -> None:
        """Allocate the memory for states of this size, so that the first saves cost no more than later ones."""
        self._check_process()
        if self._low_memory:
            return
        flat = Flat()
        flat.add("", state)
        if capture_rng:
            flat.add(RNG_KEY, rng.capture())
        with self._changed:
            for arena in self._arenas:
                arena.prepare(image_bytes(flat))

    def lend(self, size_bytes: int) -> memoryview:
        """Return memory to read a checkpoint into: an arena's, if one is free.

        An arena's memory is preferred: its pages are allocated already, or are then allocated for the first save.
        """
        with self._changed:
            if self._arenas and not self._low_memory:
                return self._arenas[-1].lend(size_bytes)
        return allocate(size_bytes, inherited=True)

    def take_back(self) -> None:
        """Return lent memory to the arenas, except memory that is still referenced."""
        with self._changed:
            for arena in self._arenas:
                arena.take_back()

    def write(
        self,
        state: Any,
        request: SaveRequest,
        *,
        capture_rng: bool = True,
        progress: Progress | None = None,
        replication: Replication | None = None,
    ) -> CheckpointInfo:
        """Copy `state` and return without waiting for storage; first raise the error of an earlier save.

        `state` is bytes or a mapping; `replication` declares which of its tensors the other ranks have as well.
        If two saves are in flight, `when_full` decides. `CheckpointError`, naming the key, for values that
        cannot be saved.
        """
        self._check_process()
        if self._closed:
            raise ConfigError("the checkpoint manager is closed")
        self._raise_earlier(request)
        try:
            ahead = not self._exiting and (self._thread is not None or self._start())
            job = self._laid_out(state, request, capture_rng, progress, replication, ahead=ahead)
        except BaseException as error:
            self._abort_in_background(request, self._saver.reason(error))
            raise
        info = job.info
        self._pending_errors.follow(info)
        snapshot = job.snapshot
        try:
            self._hand_over(job)
            del job
            snapshot.staging.run(COPY_THREADS)  # this call waits for the copy
        except BaseException:
            self._pending_errors.forget(info)  # this call raises the error
            raise
        finally:
            snapshot.staging.end()
        del snapshot
        if not self._low_memory:
            info.stage()
        self._wait_until_staged(info)
        self._finish_if_ending()
        return info

    def _raise_earlier(self, request: SaveRequest) -> None:
        """Raise the error of an earlier save; in that case drop this save on all ranks.

        This save is dropped rather than failed: a failure would make the other ranks' next saves fail, too.
        """
        ignores, self._ignores_errors_once = self._ignores_errors_once, False
        if ignores:
            return
        try:
            self.check_for_errors()
        except BaseException as error:
            why = f"rank {self._saver.catalog.rank} reported an earlier error: {error}"
            self._abort_in_background(request, f"{DROPPED}: {why}"[:1000])
            raise

    def _laid_out(
        self,
        state: Any,
        request: SaveRequest,
        capture_rng: bool,
        progress: Progress | None,
        replication: Replication | None,
        *,
        ahead: bool,
    ) -> _Job:
        """Return the job with a copy of the state or, if `ahead`, with a `Staging` that will copy the state."""
        flat = Flat(replication=replication, mesh=dict(replication.mesh) if replication is not None else {})
        tree = flat.add("", state)
        generators = flat.add(RNG_KEY, rng.capture()) if capture_rng else None
        info = CheckpointInfo(
            step=request.step,
            epoch=request.epoch,
            checkpoint_type=request.type,
            metadata=request.metadata,
            progress=progress,
        )
        arena = self._free_arena(request)
        try:
            if self._low_memory:
                snapshot = look_at(flat, tree=tree, rng=generators, arena=Arena())
            else:
                snapshot = take_snapshot(
                    flat,
                    tree=tree,
                    rng=generators,
                    arena=arena,
                    cuda=self._cuda,
                    optimizers=optimizers_in(state),
                    hashed=request.type is CheckpointType.INCREMENTAL,
                    ahead=ahead,
                )
        except BaseException:
            self._give_back(arena)
            raise
        info.bytes_total = snapshot.layout.size_bytes
        return _Job(info=info, snapshot=snapshot, request=request, arena=arena)

    def _abort_in_background(self, request: SaveRequest, reason: str) -> None:
        """Have the thread abort this save, so that no other rank waits for this rank; return before the abort."""
        if self._saver.catalog.world_size > 1:
            self._hand_over(_Failed(request=request, reason=reason))
            self._finish_if_ending()

    def _free_arena(self, request: SaveRequest) -> Arena:
        """Return an arena; if none is free, act on `when_full`."""
        with self._changed:
            if self._arenas:
                return self._arenas.pop()
        if self._when_full is WhenFull.FAIL:
            self._saver.give_up(request, f"{_TO_FREE_A_BUFFER}: {MAX_IN_FLIGHT} saves were in flight")
            raise CheckpointError(
                f"step {request.step} is not saved: {MAX_IN_FLIGHT} saves are in flight",
                hint='save less often, or let a save wait (when_full="block")',
            )
        if self._when_full is WhenFull.DROP:
            arena = self._drop(f"{_TO_FREE_A_BUFFER}: step {request.step} took its place")
            if arena is not None:
                return arena
        with self._changed:
            self._changed.wait_for(lambda: self._arenas)
            return self._arenas.pop()

    def _drop(self, reason: str) -> Arena | None:
        """Drop the newest save that has not begun, for all ranks; return its arena, or None.

        Return only once the abort is recorded: until then the other ranks wait for this rank.
        """
        with self._changed:
            job = next((job for job in reversed(self._waiting) if isinstance(job, _Job)), None)
            if job is None:
                return None
            self._waiting.remove(job)
        try:
            job.snapshot.wait()
            record = self._saver.give_up(job.request, reason)
        except BaseException as error:
            with self._changed:
                self._waiting.append(job)
                self._changed.notify_all()
            if not isinstance(error, StrataError):
                raise
            log.warning("step %d was not dropped: %s", job.request.step, error)
            return None
        if record is not None:
            self._failed_attempts[job.request.step] = record.id
        job.info.dropped = True
        job.info.fail(CheckpointAborted(f"the save of step {job.request.step} was {reason}"))
        log.warning("the save of step %d was %s", job.request.step, reason)
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()
        return job.arena

    def _give_back(self, arena: Arena) -> None:
        with self._changed:
            self._arenas.append(arena)
            self._changed.notify_all()

    def _wait_until_staged(self, info: CheckpointInfo) -> None:
        """Return once the trainer may change the state; with `low_memory`, once the state is written."""
        try:
            info.wait_until_staged()
        except BaseException:
            info.cancel()
            info.wait_until_staged()  # until it is staged, the state must not change
            raise

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Return once no save is in flight; raise the error of a failed one.

        Raise `Unavailable` after `timeout_s`; the saves go on.
        """
        self.settle(timeout_s)
        self.check_for_errors()

    @property
    def idle(self) -> bool:
        """Whether no save is in flight."""
        return self._in_flight == 0

    def give_way(self) -> None:
        """Abort the saves in flight, for all ranks, as dropped rather than failed."""
        self._pending_errors.give_way()

    def wait_for_buffer(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a free arena; return whether one is free, so that a save need not wait."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._arenas, timeout_s))

    def settle(self, timeout_s: float | None = None) -> None:
        """Return once no save is in flight, committed or not; `Unavailable` after `timeout_s`."""
        self._check_process()
        if not self._settle(timeout_s):
            raise Unavailable(f"{self._in_flight} saves are not done after {timeout_s:g} s", hint="")

    def ignore_earlier_errors(self) -> None:
        """Let the next save ignore earlier errors; a later check, or the save after the next, raises them."""
        self._ignores_errors_once = True

    def check_for_errors(self) -> None:
        """Raise the error of a failed save, unless it was raised before."""
        self._pending_errors.raise_first()

    def close(self, *, failing: bool = False) -> None:
        """Wait for the saves in flight, stop the thread, and raise the error of a failed save.

        `failing`: the program ends with an error of its own, so the wait is bounded (`failing_grace_s`). If a save is
        unfinished after the wait, its error is printed when the process exits.
        """
        if self._closed:
            return
        self._check_process()
        self._closed = True
        if self._thread is not None:
            if not self._settle_at_the_end(self._failing_grace_s if failing else None):
                raise Unavailable(f"{self._in_flight} saves were left unfinished", hint="")
            with self._changed:
                self._ending = True
                self._changed.notify_all()
            self._thread.join()
        atexit.unregister(self._at_exit)
        for arena in self._arenas:
            arena.release()
        self.check_for_errors()

    # -- the thread

    def _hand_over(self, job: _Job | _Failed) -> None:
        """Give the job to the writing thread; if no thread can start (at exit, say), do it in the calling thread."""
        with self._changed:
            self._in_flight += 1
            self._waiting.append(job)
            self._changed.notify_all()
        del job
        if self._thread is None and not self._start():
            while self._one(waits=False):
                pass

    def _finish_if_ending(self) -> None:
        """If the exit handler has run already, wait for the saves and print errors: the handler runs only once."""
        if self._exiting or (self._thread is None and not threading.main_thread().is_alive()):
            self._at_exit()

    def _start(self) -> bool:
        # a daemon thread: an idle writer keeps no program alive, and _at_exit waits for a busy one
        thread = threading.Thread(target=self._run, name="strata-checkpoints", daemon=True)
        atexit.unregister(self._at_exit)  # an earlier try may have registered it
        atexit.register(self._at_exit)
        try:
            thread.start()
        except RuntimeError:  # at interpreter shutdown, or when there are too many threads
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while self._one(waits=True):
            pass

    def _one(self, *, waits: bool) -> bool:
        """Do the next job; return False if the queue is empty and no job will be added."""
        job = self._next(waits=waits)
        if job is None:
            return False
        try:
            if isinstance(job, _Failed):
                if (given_up := self._saver.fail(job.request, job.reason)) is not None:
                    self._failed_attempts[job.request.step] = given_up.id
            else:
                record, arena = self._save(job), job.arena
                del job  # frees the snapshot before its arena is used again
                self._give_back(arena)
                if self._after_save is not None:
                    self._after_save(record)
        except BaseException as error:  # noqa: BLE001  # raised in the user's thread
            self._pending_errors.add(error)
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()
        return True

    def _next(self, *, waits: bool) -> _Job | _Failed | None:
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else None

    def _save(self, job: _Job) -> CheckpointMetadata | None:
        info, step = job.info, job.request.step
        request = dataclasses.replace(job.request, replaces=self._failed_attempts.get(step, ""))
        try:
            try:
                record = self._saver.save(job.snapshot, request, info)
            finally:
                job.snapshot.settle()  # from here on, nothing is copied to the arena, whether the save succeeded or not
        except BaseException as error:  # noqa: BLE001  # raised in the user's thread, by its handle
            if info.record is not None:
                self._failed_attempts[step] = info.record.id
            info.dropped |= isinstance(error, HoldOver)
            info.fail(error)
        else:
            self._failed_attempts.pop(step, None)
            info.succeed(record)
            log.info("step %d is committed: %s, %d bytes", step, record.path, record.size_bytes)
            return record
        log_line = log.warning if info.dropped else log.error
        log_line("the save of step %d failed: %s", step, str(info.error) or type(info.error).__name__)
        return None

    def _settle(self, timeout_s: float | None) -> bool:
        """Return whether no save is in flight any more, after waiting up to `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._in_flight == 0, timeout_s)

    def _settle_at_the_end(self, grace_s: float | None) -> bool:
        """Wait as `_settle` does, until `grace_s` passes without progress; log the unfinished work at intervals."""
        written, left_s = self._pending_errors.written, grace_s
        while not self._settle(REPORT_INTERVAL_S if left_s is None else min(left_s, REPORT_INTERVAL_S)):
            if self._pending_errors.written != written:
                written, left_s = self._pending_errors.written, grace_s
            elif left_s is not None:
                left_s -= REPORT_INTERVAL_S
                if left_s <= 0:
                    return False
            log.warning("the exit waits for %s", self._pending_errors.awaited)
        return True

    # -- the end of the process

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._exiting = True
        failing = hasattr(sys, "last_value")  # an exception ends the program
        grace_s = 0.0 if self._closed else self._failing_grace_s if failing else None
        if not self._settle_at_the_end(grace_s):
            print_on_stderr(
                f"the process ends before these steps are saved: {self._pending_errors.unfinished}"
            )
        self._pending_errors.print_all()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"process {os.getpid()} was forked from {self._pid}, whose checkpoints it cannot write",
                hint="save in the parent, or make a manager in the child",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A snapshot on its way to storage, and the arena that holds it."""

    info: CheckpointInfo
    snapshot: Snapshot
    request: SaveRequest
    arena: Arena


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A save that failed before it began; it must be aborted for the other ranks."""

    request: SaveRequest
    reason: str
