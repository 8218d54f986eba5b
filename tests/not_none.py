"""What a test knows to be there, also for the type checker."""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T")


def not_none(value: _T | None) -> _T:
    """Return it; fail if it is None."""
    assert value is not None
    return value
