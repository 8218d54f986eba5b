"""Validation of time spans from callers: finite and not negative, else `InvalidArgument` with a hint; times as text.

Every comparison with nan is false: a deadline of nan would never come, or would always have passed.
"""

from __future__ import annotations

import math
import numbers
from datetime import UTC, datetime
from typing import Final

from strata.errors import InvalidArgument

MAX_S: Final = 1e9


def seconds(
    value: object, *, what: str = "timeout_s", zero: bool = False, hint: str = "pass seconds, such as 5.0"
) -> float:
    """Return a number of seconds that is finite and above 0, or also 0 if `zero` is set."""
    if type(value) is float and (0.0 < value <= MAX_S or (zero and value == 0.0)):
        return value  # a fast path for every training step: the check of `numbers.Real` is slow
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        shown = repr(value) if isinstance(value, str | bool | None) else f"a {type(value).__name__}"
        raise InvalidArgument(f"{what} is {shown[:80]}, not a number", hint="pass seconds, such as 5.0")
    try:
        number = float(value)
    except OverflowError:  # an integer too large for a float
        number = math.inf
    if not (number >= 0 if zero else number > 0) or number > MAX_S:  # "not" also rejects nan
        least = "at least 0" if zero else "above 0"
        raise InvalidArgument(f"{what} is {number:g}; it must be {least} and at most {MAX_S:g}", hint=hint)
    return number


def timeout(value: object, *, zero: bool = False) -> float | None:
    """Return a timeout in seconds, checked like `seconds`, or None for no timeout."""
    if value is None:
        return None
    return seconds(value, zero=zero, hint="leave it out to wait without a limit")


def utc_text(unix_ms: int) -> str:
    """Return a Unix time as text: `14:02 UTC on 2026-11-25`."""
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%H:%M UTC on %Y-%m-%d}"
