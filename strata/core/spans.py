"""Spans of time that callers hand in: finite, not negative, or `InvalidArgument` with a hint.

A nan passes every comparison the wrong way round: as a deadline it is one that never comes, or
that has always passed.
"""

from __future__ import annotations

import math
import numbers
from typing import Final

from strata.errors import InvalidArgument

MAX_S: Final = 1e9


def seconds(
    value: object, *, what: str = "timeout_s", zero: bool = False, hint: str = "pass seconds, such as 5.0"
) -> float:
    """Return a number of seconds, finite and above 0, or 0 too where `zero` says so."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        shown = repr(value) if isinstance(value, str | bool | None) else f"a {type(value).__name__}"
        raise InvalidArgument(f"{what} is {shown[:80]}, not a number", hint="pass seconds, such as 5.0")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not (number >= 0 if zero else number > 0) or number > MAX_S:  # as a nan does, with "not"
        least = "at least 0" if zero else "above 0"
        raise InvalidArgument(f"{what} is {number:g}; it must be {least} and at most {MAX_S:g}", hint=hint)
    return number


def timeout(value: object, *, zero: bool = False) -> float | None:
    """Return a timeout in seconds as `seconds` does; None for none."""
    if value is None:
        return None
    return seconds(value, zero=zero, hint="leave it out to wait without an end")
