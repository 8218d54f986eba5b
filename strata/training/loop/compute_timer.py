"""`ComputeTimer`: the compute time and data wait of a rank's steps, which distinguish a straggler from waiting ranks.

In synchronous training all ranks wait for the slowest in every step, so the wall time of their steps is equal. A
rank's own time is the time it waits for its batches, plus the processor time of its trainer's thread. While that
thread sleeps in a collective, neither of the two grows. (Limit: a collective that spins instead of sleeping, as
CUDA's may, counts as compute time on all ranks. Then only slow data shows.)
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
        """The own time of the open step so far, and the part of it that waited for its batches."""
        self._mark_s = 0.0
        """The thread's processor time up to which the open step has been counted."""
        self._open = False
        self.last_s = 0.0
        """Compute time and data wait together, of the last complete step; 0 before the first."""
        self.last_data_wait_s = 0.0

    @property
    def costs(self) -> dict[str, float]:
        """This rank's own time and data wait in the last complete step, as arguments of `progress`."""
        return {"own_s": self.last_s, "data_wait_s": self.last_data_wait_s}

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield `batches`, and measure the wait for each."""
        iterator = iter(batches)
        while True:
            self._count_work()
            requested_s = self._clock.monotonic_s()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            waited_s = self._clock.monotonic_s() - requested_s
            self._spent_s += waited_s
            self._waited_s += waited_s
            self._mark_s = self._clock.thread_s()
            yield batch

    def begins(self) -> None:
        """Count the thread's work from now on, unless a step is under way already."""
        if not self._open:
            self._open, self._mark_s = True, self._clock.thread_s()

    def completed(self) -> None:
        """Close the open step; time until the next one, such as a save, does not count as own time."""
        self._count_work()
        self.last_s, self.last_data_wait_s = self._spent_s, self._waited_s
        self._spent_s = self._waited_s = 0.0
        self._open = False

    def _count_work(self) -> None:
        if self._open:
            now_s = self._clock.thread_s()
            self._spent_s += now_s - self._mark_s
            self._mark_s = now_s
