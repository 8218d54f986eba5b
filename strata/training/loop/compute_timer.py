"""The compute time and the data wait of a rank's steps: what tells the slow rank from those that wait for it.

In synchronous training all ranks wait for the slowest in every step, so their steps are equally
long. A rank's own part is the time that it waits for its batches, and the processor time of its
trainer's thread: while the thread sleeps in a collective, none of that passes. (Where a collective
spins instead of sleeping, as CUDA's streams may, it counts as own work on all ranks alike, and only
slow data shows.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from strata.training.loop.clock import Clock

T = TypeVar("T")


class ComputeTimer:
    """Measures the steps of one run, in its trainer's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spent_s = self._waited_s = 0.0
        """What the open step has cost so far, and how much of that was the wait for its batches."""
        self._mark_s = 0.0
        """The thread's processor time up to which the open step has been counted."""
        self._open = False
        self.last_s = 0.0
        """Compute time and data wait together, of the last complete step; 0 before the first."""
        self.last_data_wait_s = 0.0

    @property
    def costs(self) -> dict[str, float]:
        """What the last complete step cost this rank, as `progress` takes it."""
        return {"own_s": self.last_s, "data_wait_s": self.last_data_wait_s}

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield `batches`, and count the wait for each."""
        iterator = iter(batches)
        while True:
            self._count_work()
            asked_s = self._clock.monotonic_s()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            waited_s = self._clock.monotonic_s() - asked_s
            self._spent_s += waited_s
            self._waited_s += waited_s
            self._mark_s = self._clock.thread_s()
            yield batch

    def begins(self) -> None:
        """Count the thread's work from now on, unless a step is under way already."""
        if not self._open:
            self._open, self._mark_s = True, self._clock.thread_s()

    def completed(self) -> None:
        """The step is complete; what follows until the next one (a save, say) is nobody's part."""
        self._count_work()
        self.last_s, self.last_data_wait_s = self._spent_s, self._waited_s
        self._spent_s = self._waited_s = 0.0
        self._open = False

    def _count_work(self) -> None:
        if self._open:
            now_s = self._clock.thread_s()
            self._spent_s += now_s - self._mark_s
            self._mark_s = now_s
