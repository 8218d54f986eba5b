"""Whether a rank's process is frozen or writes a core, from what the kernel says of it (PROTOCOLS 5.6).

An agent samples the state of each rank's process. Two rules follow:

1. A process that writes a core is dead. Its socket stays open until the core is written, so its end tells too late.
2. A process is frozen if its state was `T`, stopped by a signal, in every sample for `detect_s`.

A sample that comes more than `max_gap_s` after the one before is late: the agent itself did not run, or its whole
machine did not. A late sample restarts the count, and so does one that shows that the process ran since the one before. Every state other than `T` ends the count: `t` (a debugger), `D`
(a dead disk), and "" (the state could not be read).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

STOPPED: Final = "T"
"""The letter of a process that SIGSTOP or its kin stopped. The letter of one that a debugger stopped is `t`."""


class Verdict(Enum):
    """What one sample shows of a process."""

    ALIVE = "alive"
    FROZEN = "frozen"
    DUMPS_CORE = "dumps core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How often an agent samples, and how long a process is stopped before it counts as frozen. Made by `derive`.

    A freeze is found within `detect_s + interval_s`.
    """

    detect_s: float
    interval_s: float
    max_gap_s: float
    """Two samples further apart than this prove nothing of the time between them."""

    @classmethod
    def derive(cls, detect_s: float) -> Sampling:
        """Return the spans that follow from `detect_s`: a sample may be four times as late as it is due."""
        max_gap_s = min(1.0, detect_s / 2)
        return cls(detect_s=detect_s, interval_s=max_gap_s / 4, max_gap_s=max_gap_s)

    @property
    def frozen(self) -> str:
        """The reason that the end of a frozen rank carries."""
        return f"frozen: a signal has stopped its process for {self.detect_s:g} s"

    @property
    def dumps_core(self) -> str:
        """The reason that the end of a rank carries whose process writes a core."""
        return "its process crashed and dumps core"


class StopCount:
    """For how long one process was seen stopped. All times are arguments, in seconds of one monotonic clock."""

    __slots__ = ("_sampled_s", "_sampling", "_since_s", "_switches")

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._sampled_s = float("-inf")
        self._since_s: float | None = None
        self._switches = 0

    def sample(self, now_s: float, state: str, *, switches: int = 0, dumps_core: bool = False) -> Verdict:
        """Count a sample taken at `now_s`: `state` is the kernel's letter, "" if it could not be read.

        `switches` counts how often the process was put on a processor or taken off it: one that ran between two samples
        has another.
        """
        ran, self._switches = switches != self._switches, switches
        late = now_s - self._sampled_s > self._sampling.max_gap_s
        self._sampled_s = now_s
        if dumps_core:
            return Verdict.DUMPS_CORE
        if state != STOPPED:
            self._since_s = None
            return Verdict.ALIVE
        if self._since_s is None or late or ran:
            self._since_s = now_s
        return Verdict.FROZEN if now_s >= self._since_s + self._sampling.detect_s else Verdict.ALIVE

    def due_s(self, now_s: float) -> float:
        """Return when the next sample is due: after an interval, or when a stopped process would be frozen."""
        next_s = now_s + self._sampling.interval_s
        return next_s if self._since_s is None else min(next_s, self._since_s + self._sampling.detect_s)
