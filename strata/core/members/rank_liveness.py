"""Liveness of a rank's process: frozen or writing a core, by the kernel's process state (PROTOCOLS 5.6).

An agent samples the state of each rank's process. Two rules follow:

1. A process that writes a core is dead. Its socket stays open until the core is written, so the agent would notice
   its exit too late.
2. A process is frozen if its state was `T`, stopped by a signal, in every sample for `detect_s`.

A sample that comes more than `max_gap_s` after the previous one is late: the agent, or its whole machine, did not
run. A late sample restarts the count of the stopped time. So does a sample which shows that the process ran since
the previous sample. Every state other than `T` ends the count: `t` (a debugger), `D` (a dead disk), and "" (the
state could not be read).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

STOPPED: Final = "T"
"""The state letter of a process that SIGSTOP or a related signal stopped. A debugger's stop has the letter `t`."""


class Verdict(Enum):
    """The result of one sample of a process."""

    ALIVE = "alive"
    FROZEN = "frozen"
    DUMPS_CORE = "dumps core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling interval, and how long a process must be stopped to count as frozen. Built by `derive`.

    A freeze is found within `detect_s + interval_s`.
    """

    detect_s: float
    interval_s: float
    max_gap_s: float
    """If two samples are further apart than this, they show nothing about the time between them."""

    @classmethod
    def derive(cls, detect_s: float) -> Sampling:
        """Return the spans for a `detect_s`; a sample may come up to four intervals after the previous one."""
        max_gap_s = min(1.0, detect_s / 2)
        return cls(detect_s=detect_s, interval_s=max_gap_s / 4, max_gap_s=max_gap_s)

    @property
    def frozen(self) -> str:
        """The reason in the exit report of a frozen rank."""
        return f"frozen: a signal has stopped its process for {self.detect_s:g} s"

    @property
    def dumps_core(self) -> str:
        """The reason in the exit report of a rank whose process writes a core."""
        return "its process crashed and dumps core"


class StopCount:
    """How long all samples of one process have shown it stopped. Times are in seconds of one monotonic clock."""

    __slots__ = ("_sampled_s", "_sampling", "_since_s", "_switches")

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._sampled_s = float("-inf")
        self._since_s: float | None = None
        self._switches = 0

    def sample(self, now_s: float, state: str, *, switches: int = 0, dumps_core: bool = False) -> Verdict:
        """Count a sample taken at `now_s`: `state` is the kernel's letter, "" if it could not be read.

        `switches` is the number of context switches of the process: the number changes if the process ran between
        two samples.
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
        """Return when the next sample is due: after an interval, or when a stopped process would count as frozen."""
        next_s = now_s + self._sampling.interval_s
        return next_s if self._since_s is None else min(next_s, self._since_s + self._sampling.detect_s)
