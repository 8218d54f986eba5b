"""Short history for charts: values by name and second, in rings of fixed size.

A series keeps one value a second for ten minutes and one every 15 seconds for a day. Its kind defines
how the values of one interval combine: their mean, the last, the largest, or their sum.
All times are whole seconds since 1970, and are arguments.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

INTERVALS: Final[Mapping[int, int]] = {1: 600, 15: 5760}
"""The number of intervals that are kept, by the length of an interval in seconds."""
SERIES_BYTES: Final = 4 * sum(INTERVALS.values())
"""The approximate size of one series."""
HEAT_S: Final = 10
HEAT_COLUMNS: Final = 60


class Kind(Enum):
    """How several values of one interval combine."""

    MEAN = "mean"
    LAST = "last"
    MAX = "max"
    SUM = "sum"


class _Ring:
    """The values of the newest `size` intervals; NaN for intervals without a value."""

    __slots__ = ("_count", "_values", "head", "interval_s", "size")

    def __init__(self, interval_s: int, size: int) -> None:
        self.interval_s, self.size = interval_s, size
        self.head = 0
        """The number of the newest interval written, counted from 1970."""
        self._values = array("f", [math.nan]) * size
        self._count = 0

    def put(self, second: int, value: float, kind: Kind) -> None:
        interval = second // self.interval_s
        if interval > self.head:
            self._forward_to(interval)
        elif interval < self.head:
            self.fill(interval, (value,))  # the clock was set back
            return
        place = interval % self.size
        before = self._values[place]
        self._count += 1
        match kind:
            case _ if self._count == 1:
                pass
            case Kind.MEAN:
                value = before + (value - before) / self._count
            case Kind.MAX:
                value = max(before, value)
            case Kind.SUM:
                value += before
        self._values[place] = value

    def fill(self, first: int, values: Sequence[float]) -> None:
        """Write past values from interval `first` on: only finite ones, into kept intervals without a value."""
        last = first + len(values) - 1
        if last > self.head:
            self._forward_to(last)
        begin = max(first, self.head - self.size + 1)
        held, size, isfinite = self._values, self.size, math.isfinite
        for interval, value in enumerate(
            values[begin - first :], begin
        ):  # 5,760 iterations for a day of a series
            place = interval % size
            if held[place] != held[place] and isfinite(value):  # NaN differs from itself
                held[place] = value

    def between(self, first: int, end: int) -> list[float]:
        """Return the values of the intervals from `first` to before `end`."""
        begin = max(first, self.head - self.size + 1)
        count = min(end, self.head + 1) - begin
        if count <= 0:
            return [math.nan] * (end - first)
        place = begin % self.size
        known = self._values[place : place + count]
        known += self._values[: count - len(known)]
        return [math.nan] * (begin - first) + known.tolist() + [math.nan] * (end - begin - count)

    def _forward_to(self, interval: int) -> None:
        for skipped in range(max(self.head + 1, interval - self.size + 1), interval + 1):
            self._values[skipped % self.size] = math.nan
        self.head, self._count = interval, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The values of several series of equal length, one every `interval_s`, oldest first; NaN for no value."""

    interval_s: int
    from_unix_s: int
    series: Mapping[str, Sequence[float]]


class JobHistory:
    """The series of one job."""

    def __init__(self) -> None:
        self._series: dict[str, dict[int, _Ring]] = {}
        """The rings of each series, by their interval."""
        self.oldest_s = self.newest_s = 0
        """The seconds of the oldest value ever recorded, and of the newest."""

    @property
    def names(self) -> KeysView[str]:
        """The names of the series."""
        return self._series.keys()

    def put(self, second: int, name: str, value: float, kind: Kind) -> None:
        """Record a value; a value that is not finite is ignored."""
        if not math.isfinite(value):
            return
        for ring in self._of(name).values():
            ring.put(second, value, kind)
        self._note(second)

    def _note(self, second: int) -> None:
        self.newest_s = max(self.newest_s, second)
        self.oldest_s = min(self.oldest_s or second, second)

    def fill(self, recorded: Excerpt, *, before_s: int) -> None:
        """Add the values that another replica recorded before `before_s`; values known here stay."""
        first, end = recorded.from_unix_s // recorded.interval_s, before_s // recorded.interval_s
        for name, values in recorded.series.items():
            ring = self._of(name)[recorded.interval_s]
            known = [
                place for place, value in enumerate(values[: max(0, end - first)]) if math.isfinite(value)
            ]
            if known:
                ring.fill(first + known[0], values[known[0] : known[-1] + 1])
                self._note((first + known[0]) * recorded.interval_s)
                self._note((first + known[-1]) * recorded.interval_s)

    def excerpt(
        self, interval_s: int, since_s: int, until_s: int, *, names: Iterable[str] | None = None
    ) -> Excerpt:
        """Return the intervals from `since_s`, or from the oldest value if that is later, that have ended by `until_s`.

        `names`: only these series. `KeyError` for an interval that is not kept, or an unknown series.
        """
        end = until_s // interval_s
        first = max(-(-since_s // interval_s), self.oldest_s // interval_s, end - INTERVALS[interval_s])
        return Excerpt(
            interval_s=interval_s,
            from_unix_s=first * interval_s,
            series={
                name: self._series[name][interval_s].between(first, max(first, end))
                for name in (self._series if names is None else names)
            },
        )

    def _of(self, name: str) -> dict[int, _Ring]:
        if name not in self._series:
            self._series[name] = {each_s: _Ring(each_s, size) for each_s, size in INTERVALS.items()}
        return self._series[name]


class Heat:
    """The step times that the ranks of one generation report, in columns of ten seconds, for ten minutes."""

    def __init__(self, generation: int, ranks: int) -> None:
        self.generation, self.ranks = generation, ranks
        self._columns: dict[int, array[int]] = {}

    def put(self, second: int, rank: int, step_us: int) -> None:
        """Record a rank's step time; the last one of a column stays."""
        number = second // HEAT_S
        column = self._columns.get(number)
        if column is None:
            column = self._columns[number] = array("I", [0]) * self.ranks
            for old in [each for each in self._columns if each <= number - HEAT_COLUMNS]:
                del self._columns[old]
        if 0 <= rank < self.ranks:
            column[rank] = min(step_us, 2**32 - 1)

    def columns(self, since_s: int, until_s: int) -> tuple[int, list[list[int | None]]]:
        """Return the second at which the first column begins, and the columns between `since_s` and `until_s`."""
        kept = sorted(n for n in self._columns if n * HEAT_S >= since_s and (n + 1) * HEAT_S <= until_s)
        if not kept:
            return since_s, []
        empty: list[int | None] = [None] * self.ranks
        found = [
            [value or None for value in self._columns[number]] if number in self._columns else empty
            for number in range(kept[0], kept[-1] + 1)
        ]
        return kept[0] * HEAT_S, found


def percentile(ordered: Sequence[int], percent: int) -> int:
    """Return the smallest of these ordered values such that `percent` % of them are not greater (nearest rank)."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


class Pace:
    """Steps per second, from the moments at which the step count grew.

    The rate covers the last ten seconds, or the last `LEAST` steps if these took longer.
    """

    LEAST: Final = 3
    WINDOW_S: Final = 10.0

    def __init__(self) -> None:
        self._grew: list[tuple[float, int]] = []

    def note(self, now_s: float, count: int) -> None:
        """Record the count; a smaller count restarts the measurement."""
        if self._grew and count < self._grew[-1][1]:
            self._grew.clear()
        if self._grew and count == self._grew[-1][1]:
            return
        self._grew.append((now_s, count))
        while len(self._grew) > self.LEAST + 1 and self._grew[1][0] < now_s - self.WINDOW_S:
            del self._grew[0]

    def per_s(self, now_s: float) -> float | None:
        """Return the rate at `now_s`, or None while unknown. The rate falls while the count does not grow."""
        if len(self._grew) < 2:
            return None
        (began_s, before), (last_s, after) = self._grew[0], self._grew[-1]
        usual_s = (last_s - began_s) / (len(self._grew) - 1)
        end_s = now_s if now_s - last_s > 2 * usual_s else last_s
        return (after - before) / (end_s - began_s) if end_s > began_s else None

    def since_s(self, now_s: float) -> float | None:
        """Return how long ago the count last grew, in seconds."""
        return now_s - self._grew[-1][0] if self._grew else None
