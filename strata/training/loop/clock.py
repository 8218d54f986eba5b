"""`Clock`: the three time functions that a run uses; a test can replace them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """`monotonic_s` for durations, `unix_s` for times that other generations and hosts read,
    `thread_s` for the processor time of the calling thread; all in seconds.
    """

    monotonic_s: Callable[[], float]
    unix_s: Callable[[], float]
    thread_s: Callable[[], float]
