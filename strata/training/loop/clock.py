"""What a run reads the time from: three functions, so that a test can hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """`monotonic_s` for durations; `unix_s` for what other generations and hosts are to understand;
    `thread_s` for what the calling thread used of a processor.
    """

    monotonic_s: Callable[[], float]
    unix_s: Callable[[], float]
    thread_s: Callable[[], float]
