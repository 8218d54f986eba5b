"""Polls a condition until it is true, for example that a process has started."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_not_result, stop_after_delay, wait_fixed

_T = TypeVar("_T")


def until(condition: Callable[[], _T], timeout_s: float, *, every_s: float = 0.02) -> _T:
    """Return the first true result of `condition`, or its last result after the limit."""
    return Retrying(
        retry=retry_if_not_result(bool),
        stop=stop_after_delay(timeout_s),
        wait=wait_fixed(every_s),
        retry_error_callback=_last,
    )(condition)


def _last(state: RetryCallState) -> object:
    assert state.outcome is not None
    return state.outcome.result()
