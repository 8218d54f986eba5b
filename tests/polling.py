"""Polling for the result of a process or thread that sends no event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from strata.devcluster import polling
from tests.processes import LIMIT_S

_T = TypeVar("_T")


def until(
    condition: Callable[[], _T],
    what: str | Callable[[], object] = "it never came about",
    *,
    limit_s: float = LIMIT_S,
) -> _T:
    """Return the first true answer of `condition`; fail with `what` if there is none within the limit."""
    answer = polling.until(condition, limit_s, every_s=0.01)
    assert answer, what if isinstance(what, str) else what()
    return answer
