"""Bars and sparklines of characters, for terminals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

LEVELS: Final = "▁▂▃▄▅▆▇█"
DONE: Final = "━"
TO_DO: Final = "─"
ASCII: Final = str.maketrans("▁▂▃▄▅▆▇█▓▒░▚━─·…▲▼", "_.-=+*##%:./=-.~^v")
"""Substitutes for terminals whose encoding has only ASCII."""


def bar(ratio: float, width: int) -> tuple[str, str]:
    """Return the filled and the unfilled part of a bar of `width`: it is empty only at 0, and full only at 1."""
    done = width if ratio >= 1 else 0 if ratio <= 0 else min(width - 1, max(1, int(ratio * width)))
    return DONE * done, TO_DO * (width - done)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a sparkline of values, oldest first, at most `width` wide; an unknown value is a blank."""
    means = _means(values, width)
    known = [value for value in means if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)

    def level(value: float | None) -> str:
        if value is None:
            return " "
        if high == low:
            return LEVELS[3]
        return LEVELS[min(7, int(8 * (value - low) / (high - low)))]

    return "".join(map(level, means))


def _means(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return at most `width` means of runs of values. All runs have the same length, but the oldest may be shorter."""
    if not values or width < 1:
        return []
    per = -(-len(values) // width)
    first = len(values) % per or per
    edges = [0, *range(first, len(values) + 1, per)]
    return [_mean(values[a:b]) for a, b in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def shares(parts: Sequence[float], total: int) -> list[int]:
    """Return integers proportional to `parts` that sum to `total`, by largest remainder; zeros if all parts are 0."""
    whole = math.fsum(parts)
    if whole <= 0:
        return [0 for _ in parts]
    exact = [total * part / whole for part in parts]
    given = [int(each) for each in exact]
    by_remainder = sorted(range(len(parts)), key=lambda at: given[at] - exact[at])
    for at in by_remainder[: total - sum(given)]:
        given[at] += 1
    return given
