"""The progress of a snapshot's copy, so that the first blocks are written while the last ones are being copied.

The trainer's thread copies in runs, from the image's beginning to its end, and marks each run as copied. The
writer's thread waits for the bytes of a block before it reads them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from strata.checkpoint.storage.pipeline import spread
from strata.errors import CheckpointAborted


class Staging:
    """The runs of one copy. `work(n)` copies run n; once runs 0 to n are copied, the image is copied up to `ends[n]`.

    `kept` is the source of the copy: it is referenced only until the copy is done.
    """

    def __init__(
        self, ends: Sequence[int] = (), work: Callable[[int], None] | None = None, *, kept: object = None
    ) -> None:
        self._ends = ends
        self._work = work
        self._kept = kept
        self._copied = [False] * len(ends)
        self._next = 0
        self._failed = False
        self._changed = threading.Condition()
        self.done_s = 0.0
        """The monotonic time at which the last run was copied; 0 until then, and if there is nothing to copy."""

    def run(self, threads: int) -> None:
        """Copy all runs, in the calling thread and others; return when no thread copies any more.

        An error is raised here, and makes `wait` raise, too. Do nothing if all runs are copied already.
        """
        if self._is_there(None):
            return
        try:
            spread(len(self._ends), self._run, threads=threads)
        finally:
            self.end()

    def end(self) -> None:
        """Record that no run is copied any more; runs that are not copied yet never will be."""
        with self._changed:
            self._failed = not self._is_there(None)
            self._work = self._kept = None  # they refer to the trainer's tensors
            self._changed.notify_all()

    def wait(self, size_bytes: int | None = None) -> None:
        """Return once the image's first `size_bytes` are copied, or all of it.

        `CheckpointAborted` if the copy failed before these bytes.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._is_there(size_bytes))
            if not self._is_there(size_bytes):
                raise CheckpointAborted("the state was not copied whole", hint="save it again")

    def _is_there(self, size_bytes: int | None) -> bool:
        if self._next == len(self._ends):
            return True
        return size_bytes is not None and self._next > 0 and size_bytes <= self._ends[self._next - 1]

    def _run(self, number: int) -> None:
        assert self._work is not None
        self._work(number)
        with self._changed:
            self._copied[number] = True
            before = self._next
            while self._next < len(self._ends) and self._copied[self._next]:
                self._next += 1
            if self._next > before:
                if self._next == len(self._ends):
                    self.done_s = time.monotonic()
                self._changed.notify_all()
