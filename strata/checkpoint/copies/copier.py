"""Carrying committed checkpoints from the near storage to the far one, in a thread of its own.

Each rank copies its own files, and those of a larger world's ranks are shared out; rank 0 copies the
global manifest too. Whoever finds the far copy whole marks it: with every manifest and image there,
the marker says the same as the near one. So of several ranks the last one to finish marks, and no
message passes between them but the note of one that cannot.

A far storage that is away is tried again and again; nothing of a training waits for it. What cannot be
copied, because it is corrupt here or for a reason that nobody foresaw, is told, and the next one is
copied, and nothing is built on what is corrupt. What an earlier process left behind is carried on with the
first save.
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
from strata.checkpoint.save.bases import Doubted
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.save.pending_errors import tell_on_stderr
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
"""How long to wait after each failure in a row; the last one from then on."""
LOOK_S: Final = 2.0
"""How often to look whether the other ranks are done."""
OTHERS_S: Final = 600.0
"""How long `wait` waits for other ranks none of whose parts comes; they may only be slow."""
CLOSE_S: Final = 5.0
_HINT: Final = "they are committed in the near storage; the next save goes on with them"

log: Final = logging.getLogger("strata.checkpoint")


class Replicator:
    """Copies the share of one of `ranks` ranks in each checkpoint from `near` to `far`, in their order.

    `missing` is asked once, in the thread, what earlier processes left to be copied; `afterwards` is called
    there after each turn: what else has to ask the far storage, so that no save waits for it. `world`
    names these ranks. What it finds damaged is `doubted`.
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
        doubted: Doubted | None = None,
        missing: Callable[[], list[Replica]] = list,
        afterwards: Callable[[], None] = lambda: None,
        retry_s: tuple[float, ...] = RETRY_S,
        look_s: float = LOOK_S,
        others_s: float = OTHERS_S,
    ) -> None:
        self._near = near
        self._far = far
        self._copy = FarCopy(
            near, far, rank=rank, ranks=ranks, world=world, report=report, closed=lambda: self._closed
        )
        self._doubted = doubted if doubted is not None else Doubted()
        self._missing = missing
        self._afterwards = afterwards
        self._retry_s = retry_s
        self._look_s = look_s
        self._others_s = others_s
        self._changed = threading.Condition()
        self._queue: collections.deque[Replica] = collections.deque()
        self._copied: dict[Replica, str] = {}
        """What this rank's part of lies there, and what the whole lacks yet."""
        self._news_s = 0.0
        """When that changed last, or the far storage was away: the others may find it away as well."""
        self._marked: set[str] = set()
        self._infos: list[CheckpointInfo] = []
        self._error: StrataError | None = None
        self._lost: list[StrataError] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        # now, so that it comes after the saves that the process still waits for at its end
        atexit.register(self._at_exit)

    def add(self, replica: Replica) -> None:
        """Copy it, soon."""
        with self._changed:
            self._queue.append(replica)
            self._changed.notify_all()
        self._start()

    def follow(self, info: CheckpointInfo) -> None:
        """Tell `info` when its checkpoint is there."""
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
            except RuntimeError:  # the process is ending: a later one goes on with it
                return
            self._thread = thread

    def wait(self, timeout_s: float | None) -> None:
        """Return once all is there; raise what it fails of, `StorageError`, after `timeout_s`.

        Also when the parts of other ranks do not come any more. What cannot be copied is raised once.
        """
        begun_s = time.monotonic()
        with self._changed:
            if self._left():  # who has saved nothing leaves what is left to the next who saves
                self._start()
            if self._thread is None and self._left():
                raise StorageError(
                    f"steps {self._left()} are not in {self._far.uri} yet: no thread can be started",
                    hint=_HINT,
                )
            self._changed.wait_for(lambda: not self._queue and self._waits_in_vain(begun_s), timeout_s)
            self._raise_lost()
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
        """Raise, once, what a checkpoint could not be copied for."""
        with self._changed:
            self._raise_lost()

    def close(self) -> None:
        """Stop, whatever is left; it stays in the near storage, and a later process goes on with it."""
        self._stop()
        with self._changed:
            lost, self._lost = self._lost, []
        for error in lost:
            log.error("nobody was told of a copy that failed: %s", error.message)

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self._at_exit)
        if self._thread is not None:
            self._thread.join(CLOSE_S)  # a request that hangs is left to the end of the process

    def _left(self) -> list[int]:
        """Return the steps that are not there yet."""
        return sorted({replica.step for replica in (*self._copied, *self._queue)})

    def _raise_lost(self) -> None:
        """Raise the first of what is lost, with the others as its notes."""
        if self._lost:
            lost, self._lost = self._lost, []
            for other in lost[1:]:
                lost[0].add_note(f"and: {other.message}")
            raise lost[0]

    def _waits_in_vain(self, begun_s: float) -> bool:
        """Whether nothing came, since `begun_s`, of what is waited for; so also when nothing is."""
        late = max(self._news_s, begun_s) < time.monotonic() - self._others_s
        return all(lacks and late for lacks in self._copied.values())

    def _at_exit(self) -> None:
        """Stop; say what is not copied, for nobody waited for it."""
        self._stop()
        left = self._left()
        told = [str(error) for error in self._lost]
        if left:
            why = f": {self._error}" if self._error is not None else ""
            told.append(
                f"steps {left} are not in {self._far.uri} yet, the next process that saves goes on{why}"
            )
        for line in told:
            tell_on_stderr(line)

    # -- the thread

    def _run(self) -> None:
        failures = 0
        asked = False
        while True:
            with self._changed:
                if failures:
                    after_s = self._retry_s[min(failures, len(self._retry_s)) - 1]
                    self._changed.wait_for(lambda: self._closed, after_s)
                elif asked:
                    look_s = self._look_s if self._copied else None
                    self._changed.wait_for(lambda: self._closed or self._queue, look_s)
                if self._closed:
                    return
            try:
                if not asked:
                    self._look_back()
                    asked = True
                self._turn()
                with self._losing("what is kept is not looked through", StrataError):
                    self._afterwards()
            except StrataError as error:
                failures += 1
                self._say_why(error)
            except Closed:
                return
            else:
                failures, self._error = 0, None

    def _say_why(self, error: StrataError) -> None:
        log.warning("the copy to %s waits: %s", self._far.uri, error.message)
        with self._changed:
            self._error = error
            self._news_s = time.monotonic()
            self._changed.notify_all()

    def _look_back(self) -> None:
        """Take up what earlier processes left."""
        with self._losing("what earlier processes left is not copied"):
            found = self._missing()
            with self._changed:
                known = {replica.folder for replica in self._queue}
                self._queue.extendleft(reversed([r for r in found if r.folder not in known]))

    @contextlib.contextmanager
    def _losing(self, what: str, *told: type[StrataError]) -> Iterator[None]:
        """Keep, for whoever asks, an error of these types, and one that nobody foresaw: `what` says what it means.

        Any other `StrataError` is raised: the turn is tried again.
        """
        try:
            yield
        except told as error:
            self._lose(error)
        except (StrataError, Closed):
            raise
        except Exception as error:  # noqa: BLE001  # told to whoever asks next
            self._lose(self._unforeseen(what, error))

    def _unforeseen(self, what: str, error: Exception) -> StorageError:
        lost = StorageError(
            f"{what} to {self._far.uri}: {type(error).__name__}: {error}",
            hint="it is whole in the near storage; the next process that saves goes on with it",
        )
        lost.__cause__ = error
        return lost

    def _lose(self, error: StrataError) -> None:
        """Keep an error for whoever asks; the same is kept once."""
        log.error("of the copy to %s: %s", self._far.uri, error.message)
        with self._changed:
            if all(error.message != other.message for other in self._lost):
                self._lost.append(error)
            self._changed.notify_all()

    def _turn(self) -> None:
        """Copy one checkpoint, if any waits, and mark those that are whole."""
        if self._queue:
            replica = self._queue[0]
            try:
                copied = self._try(replica)
            except (StrataError, Closed):
                with self._changed:
                    self._queue.rotate(-1)  # it keeps no other waiting
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
                self._changed.notify_all()  # whoever waits looks how long it is that nothing comes

    def _try(self, replica: Replica) -> bool:
        """Copy this rank's files; False when they are gone here, or cannot be copied."""
        try:
            self._copy.copy(replica)
        except (Refused, CheckpointNotFound) as error:
            log.info("step %d is not copied any more: %s", replica.step, error.message)
            return False
        except CheckpointCorrupt as error:
            if self._is_here(replica):
                self._doubted.note(replica.folder, error.message)  # first: whoever is told may save at once
                self._give_up(replica, error)
            return False
        except CheckpointError as error:  # the coordinators will not have it
            self._give_up(replica, error, for_all=True)
            return False
        except (StrataError, Closed):
            raise
        except Exception as error:  # noqa: BLE001  # told to whoever asks next
            self._give_up(replica, self._unforeseen(f"step {replica.step} is not copied", error))
            return False
        return True

    def _give_up(self, replica: Replica, error: StrataError, *, for_all: bool = False) -> None:
        self._lose(error)
        self._copy.give_up(replica, error.message, for_all=for_all)

    def _lacking(self, replica: Replica) -> str:
        """Return what the copy lacks; "" once it is marked, or never will be."""
        lacks = ""
        with self._losing(f"step {replica.step} is not copied", CheckpointError, PartLost):
            if self._is_here(replica) and not (lacks := self._copy.mark(replica)):
                self._tell(replica)
                log.info("step %d is in %s", replica.step, self._far.uri)
        return lacks

    def _is_here(self, replica: Replica) -> bool:
        """Tell whether retention was not faster: it takes the marker, then the manifest, then what that names.

        The marker may be missing, too, where the storage refused it and the catalog has the commit. Then the near
        manifest tells; the far one may be of a copy that is half made.
        """
        near, *_far = tiers_of(self._near)
        return self._near.exists(f"{replica.folder}/{MARKER}") or near.exists(
            f"{replica.folder}/{GLOBAL_NAME}"
        )

    def _tell(self, replica: Replica) -> None:
        with self._changed:
            self._marked.add(replica.attempt)
            for info in self._infos:
                if info.record is not None and info.record.id == replica.attempt:
                    info.replicated = True
            self._infos = [info for info in self._infos if not info.replicated]
