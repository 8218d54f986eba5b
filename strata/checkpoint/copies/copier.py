"""Copying committed checkpoints from the near storage to the far storage, in a separate thread.

Each rank copies its own files. If the world that saved had more ranks, the others' files are divided among the ranks.
Rank 0 copies the global manifest, too. The rank that finds every manifest and image in the far storage writes the
marker there, with the same bytes as the near marker. So the last rank to finish marks the copy, and ranks exchange no
messages except the note of a rank that cannot copy its part.

If the far storage is not reachable, the copy is retried until it succeeds; training never waits for it. A
checkpoint cannot be copied if its near copy is corrupt, or after an unforeseen error. Then the error is reported, and
the next checkpoint is copied. No save builds on a corrupt checkpoint. The first save also continues copies that an
earlier process left unfinished.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from strata.checkpoint.copies.far_copy import Closed, FarCopy, PartLost, Replica, Report
from strata.checkpoint.copies.tiers import tiers_of
from strata.checkpoint.format.manifest import GLOBAL_NAME
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.save.bases import DamagedCheckpoints
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.save.pending_errors import print_on_stderr
from strata.checkpoint.storage.sink import Storage, unobserved
from strata.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    Refused,
    StorageError,
    StrataError,
)

RETRY_S: Final = (1.0, 5.0, 15.0, 60.0)
"""The pauses after consecutive failures; the last one repeats."""
POLL_S: Final = 2.0
"""The interval at which a rank checks whether the other ranks are done."""
OTHERS_S: Final = 600.0
"""The time for which `wait` waits without a new part of another rank: long, because other ranks may be slow."""
CLOSE_S: Final = 5.0
_HINT: Final = "they are committed in the near storage; the next save goes on with them"

log: Final = logging.getLogger("strata.checkpoint")


class Copier:
    """Copies one rank's share (of `ranks` shares) of each checkpoint from `near` to `far`, in the checkpoints' order.

    The copier's thread calls `missing` once, for the checkpoints that earlier processes did not copy. It calls
    `afterwards` after each turn, for other work that needs the far storage, so that no save waits for that work.
    `world` identifies the ranks' world. Checkpoints found damaged are added to `damaged`.
    """

    def __init__(
        self,
        near: Storage,
        far: Storage,
        *,
        rank: int,
        ranks: int,
        world: str = "",
        report: Report = unobserved,
        damaged: DamagedCheckpoints | None = None,
        missing: Callable[[], list[Replica]] = list,
        afterwards: Callable[[], None] = lambda: None,
        retry_s: tuple[float, ...] = RETRY_S,
        poll_s: float = POLL_S,
        others_s: float = OTHERS_S,
    ) -> None:
        self._near = near
        self._far = far
        self._copy = FarCopy(
            near, far, rank=rank, ranks=ranks, world=world, report=report, closed=lambda: self._closed
        )
        self._doubted = damaged if damaged is not None else DamagedCheckpoints()
        self._missing = missing
        self._afterwards = afterwards
        self._retry_s = retry_s
        self._poll_s = poll_s
        self._others_s = others_s
        self._changed = threading.Condition()
        self._queue: collections.deque[Replica] = collections.deque()
        self._copied: dict[Replica, str] = {}
        """Checkpoints whose files this rank has copied, each with a text that says which other files are missing."""
        self._news_s = 0.0
        """The time of the last change of `_copied`, or of a far storage failure, which may also delay other ranks."""
        self._marked: set[str] = set()
        self._infos: list[CheckpointInfo] = []
        self._error: StrataError | None = None
        self._failures: list[StrataError] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        # registered now, so that it runs after the exit handler that waits for the last saves
        atexit.register(self._at_exit)

    def add(self, replica: Replica) -> None:
        """Queue a checkpoint for copying."""
        with self._changed:
            self._queue.append(replica)
            self._changed.notify_all()
        self._start()

    def follow(self, info: CheckpointInfo) -> None:
        """Set `info.replicated` once its checkpoint is copied."""
        self._start()
        with self._changed:
            if info.record is not None and info.record.id in self._marked:
                info.replicated = True
            else:
                self._infos = [i for i in self._infos if i.error is None]
                self._infos.append(info)

    def _start(self) -> None:
        with self._changed:
            if self._thread is not None or self._closed:
                return
            thread = threading.Thread(target=self._run, name="strata-replicator", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process is exiting: a later process continues
                return
            self._thread = thread

    def wait(self, timeout_s: float | None) -> None:
        """Return once all checkpoints are copied; raise the error of a copy, or `StorageError` after `timeout_s`.

        Raise `StorageError`, too, if no more parts of other ranks arrive. The error of a copy is raised only once.
        """
        begun_s = time.monotonic()
        with self._changed:
            if self._left():  # only a process that saved continues the copies of an earlier process
                self._start()
            if self._thread is None and self._left():
                raise StorageError(
                    f"steps {self._left()} are not in {self._far.uri} yet: no thread can be started",
                    hint=_HINT,
                )
            self._changed.wait_for(lambda: not self._queue and self._no_progress(begun_s), timeout_s)
            self._raise_failures()
            left = self._left()
            if not left:
                return
            error, lacks = self._error, [each for each in self._copied.values() if each]
        if error is None:
            why = lacks[0] if lacks else "it takes longer"
            raise StorageError(f"steps {left} are not in {self._far.uri} yet: {why}", hint=_HINT)
        raise StorageError(
            f"steps {left} are not in {self._far.uri} yet: {error.message}",
            hint=error.hint,
            transient=error.transient if isinstance(error, StorageError) else "",
        ) from error

    def check(self) -> None:
        """Raise the error that prevented a checkpoint's copy, unless it was raised before."""
        with self._changed:
            self._raise_failures()

    def close(self) -> None:
        """Stop; uncopied checkpoints stay in the near storage, and a later process continues."""
        self._stop()
        with self._changed:
            failures, self._failures = self._failures, []
        for error in failures:
            log.error("no call reported this failed copy: %s", error.message)

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self._at_exit)
        if self._thread is not None:
            self._thread.join(CLOSE_S)  # not longer: a request that hangs ends with the process

    def _left(self) -> list[int]:
        """Return the steps that are not copied yet."""
        return sorted({replica.step for replica in (*self._copied, *self._queue)})

    def _raise_failures(self) -> None:
        """Raise the first error of a failed copy, with the others as notes."""
        if self._failures:
            failures, self._failures = self._failures, []
            for other in failures[1:]:
                failures[0].add_note(f"and: {other.message}")
            raise failures[0]

    def _no_progress(self, begun_s: float) -> bool:
        """Return whether the awaited copies have made no progress for `OTHERS_S`; True if no copy is awaited."""
        late = max(self._news_s, begun_s) < time.monotonic() - self._others_s
        return all(lacks and late for lacks in self._copied.values())

    def _at_exit(self) -> None:
        """Stop; print which steps are not copied, because no caller waited for them."""
        self._stop()
        left = self._left()
        lines = [str(error) for error in self._failures]
        if left:
            why = f": {self._error}" if self._error is not None else ""
            lines.append(
                f"steps {left} are not in {self._far.uri} yet, the next process that saves goes on{why}"
            )
        for line in lines:
            print_on_stderr(line)

    # -- the thread

    def _run(self) -> None:
        failures = 0
        looked_back = False
        while True:
            with self._changed:
                if failures:
                    after_s = self._retry_s[min(failures, len(self._retry_s)) - 1]
                    self._changed.wait_for(lambda: self._closed, after_s)
                elif looked_back:
                    poll_s = self._poll_s if self._copied else None
                    self._changed.wait_for(lambda: self._closed or self._queue, poll_s)
                if self._closed:
                    return
            try:
                if not looked_back:
                    self._find_missing_copies()
                    looked_back = True
                self._turn()
                with self._collecting_errors("the garbage collection after copies", StrataError):
                    self._afterwards()
            except StrataError as error:
                failures += 1
                self._record_failure(error)
            except Closed:
                return
            else:
                failures, self._error = 0, None

    def _record_failure(self, error: StrataError) -> None:
        log.warning("the copy to %s waits: %s", self._far.uri, error.message)
        with self._changed:
            self._error = error
            self._news_s = time.monotonic()
            self._changed.notify_all()

    def _find_missing_copies(self) -> None:
        """Queue the copies that earlier processes left unfinished."""
        with self._collecting_errors("unfinished copies of earlier processes are not made"):
            found = self._missing()
            with self._changed:
                known = {replica.folder for replica in self._queue}
                self._queue.extendleft(reversed([r for r in found if r.folder not in known]))

    @contextlib.contextmanager
    def _collecting_errors(self, what: str, *collected: type[StrataError]) -> Iterator[None]:
        """Collect errors of these types, and unforeseen errors, for the next caller; `what` describes the consequence.

        Any other `StrataError` is raised: then the turn is retried.
        """
        try:
            yield
        except collected as error:
            self._collect(error)
        except (StrataError, Closed):
            raise
        except Exception as error:  # noqa: BLE001  # raised to the next caller
            self._collect(self._unforeseen(what, error))

    def _unforeseen(self, what: str, error: Exception) -> StorageError:
        failure = StorageError(
            f"{what} to {self._far.uri}: {type(error).__name__}: {error}",
            hint="it is whole in the near storage; the next process that saves goes on with it",
        )
        failure.__cause__ = error
        return failure

    def _collect(self, error: StrataError) -> None:
        """Collect an error for the next caller; equal errors only once."""
        log.error("of the copy to %s: %s", self._far.uri, error.message)
        with self._changed:
            if all(error.message != other.message for other in self._failures):
                self._failures.append(error)
            self._changed.notify_all()

    def _turn(self) -> None:
        """Copy one queued checkpoint, if any, and mark the copies that are whole."""
        if self._queue:
            replica = self._queue[0]
            try:
                copied = self._try(replica)
            except (StrataError, Closed):
                with self._changed:
                    self._queue.rotate(-1)  # so that this checkpoint does not block the others
                raise
            with self._changed:
                self._queue.popleft()
                if copied:
                    self._copied[replica] = ""
                    self._news_s = time.monotonic()
                self._changed.notify_all()
        for waiting in list(self._copied):
            lacks = self._lacking(waiting)
            with self._changed:
                if lacks != self._copied[waiting]:
                    self._news_s = time.monotonic()
                if lacks:
                    self._copied[waiting] = lacks
                else:
                    del self._copied[waiting]
                self._changed.notify_all()  # so that `wait` checks again for how long there was no progress

    def _try(self, replica: Replica) -> bool:
        """Copy this rank's files; return False if the near files are removed, or cannot be copied."""
        try:
            self._copy.copy(replica)
        except (Refused, CheckpointNotFound) as error:
            log.info("step %d is not copied any more: %s", replica.step, error.message)
            return False
        except CheckpointCorrupt as error:
            if self._is_here(replica):
                # before the error is raised, because the caller may save right after it
                self._doubted.note(replica.folder, error.message)
                self._give_up(replica, error)
            return False
        except CheckpointError as error:  # the coordinators reject the copy
            self._give_up(replica, error, for_all=True)
            return False
        except (StrataError, Closed):
            raise
        except Exception as error:  # noqa: BLE001  # raised to the next caller
            self._give_up(replica, self._unforeseen(f"step {replica.step} is not copied", error))
            return False
        return True

    def _give_up(self, replica: Replica, error: StrataError, *, for_all: bool = False) -> None:
        self._collect(error)
        self._copy.give_up(replica, error.message, for_all=for_all)

    def _lacking(self, replica: Replica) -> str:
        """Return as text which files the copy lacks; "" once the copy is marked, or if it cannot be completed."""
        lacks = ""
        with self._collecting_errors(f"step {replica.step} is not copied", CheckpointError, PartLost):
            if self._is_here(replica) and not (lacks := self._copy.mark(replica)):
                self._set_replicated(replica)
                log.info("step %d is in %s", replica.step, self._far.uri)
        return lacks

    def _is_here(self, replica: Replica) -> bool:
        """Return whether the near checkpoint still exists: retention removes marker, manifest, then the rest.

        The marker may also be missing because the storage refused it. Then the catalog proves the commit, and the
        checkpoint exists if the near manifest does. The far manifest proves nothing: its copy may be unfinished.
        """
        near, *_far = tiers_of(self._near)
        return self._near.exists(f"{replica.folder}/{MARKER}") or near.exists(
            f"{replica.folder}/{GLOBAL_NAME}"
        )

    def _set_replicated(self, replica: Replica) -> None:
        with self._changed:
            self._marked.add(replica.attempt)
            for info in self._infos:
                if info.record is not None and info.record.id == replica.attempt:
                    info.replicated = True
            self._infos = [info for info in self._infos if not info.replicated]
