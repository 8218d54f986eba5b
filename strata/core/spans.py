"""Spans of time that callers hand in: finite, not negative, or `InvalidArgument` with a hint; and times in words.

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
    if type(value) is float and (0.0 < value <= MAX_S or (zero and value == 0.0)):
        return value  # each step of a training comes by here, and the look at `numbers.Real` is not cheap
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


def utc_text(unix_ms: int) -> str:
    """Return a time since 1970 as people read it: `14:02 UTC on 2026-11-25`."""
    minutes = unix_ms // 60_000
    year, month, day = _civil(minutes // 1440)
    return f"{minutes // 60 % 24:02}:{minutes % 60:02} UTC on {year:04}-{month:02}-{day:02}"


def _civil(days: int) -> tuple[int, int, int]:
    """Return year, month and day of a number of days since 1970-01-01, in the Gregorian calendar."""
    days += 719_468  # since 0000-03-01: the leap day is a year's last then
    era, of_era = divmod(days, 146_097)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    shifted = (5 * of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    return era * 400 + year + (month <= 2), month, of_year - (153 * shifted + 2) // 5 + 1
