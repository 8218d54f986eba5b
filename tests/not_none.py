"""Narrows an optional value for a test and for the type checker."""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T")


def not_none(value: _T | None) -> _T:
    """Return the value; fail if it is None."""
    assert value is not None
    return value
