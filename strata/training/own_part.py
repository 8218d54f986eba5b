"""How long a rank's own part of a step takes: what tells the slow rank from those that wait for it.

In synchronous training all ranks wait for the slowest in every step, so their steps are equally
long. A rank's own part is the time that it waits for its next batch, and the processor time of its
trainer's thread: while the thread sleeps in a collective, none of that passes. (Where a collective
spins instead of sleeping, as CUDA's streams may, it counts as own work on all ranks alike, and only
slow data shows.)
"""

from __future__ import annotations

from typing import Protocol


class Clocks(Protocol):
    """The time of day that only goes forward, and what the calling thread used of a processor."""

    def monotonic_s(self) -> float: ...
    def thread_s(self) -> float: ...


class OwnPart:
    """Measures each step (`hooks.StepHook`); `last_s` is the last complete one's, 0 before it."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._completed_s: float | None = None
        self._waited_s = 0.0
        self._began_s = clocks.thread_s()
        self.last_s = 0.0

    def begins(self, step: int) -> None:
        if self._completed_s is not None:
            self._waited_s = self._clocks.monotonic_s() - self._completed_s
        self._began_s = self._clocks.thread_s()

    def completed(self, step: int) -> None:
        self.last_s = self._waited_s + self._clocks.thread_s() - self._began_s
        self._completed_s = self._clocks.monotonic_s()
        self._waited_s = 0.0

    def pass_over(self) -> None:
        """Count nothing of what passed since the last step: a save, an evaluation."""
        self._completed_s = self._clocks.monotonic_s()

    def closed(self) -> None:
        pass
