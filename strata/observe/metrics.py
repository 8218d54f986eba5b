"""Counters and histograms, without a library: hot paths update them, and `/metrics` reads them.

A family has a name, a help text, and one child for each combination of label values. A caller gets a child once and
keeps it: `child.add()` is then one addition, without a lookup. The process has no registry: each replica has its own
families, so that several replicas can run in one process.

Names, units and suffixes follow Prometheus: `_total` for counters, base units (`_seconds`, `_bytes`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

C = TypeVar("C")

LATENCY_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of a histogram of request durations."""


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        """Add `amount`."""
        self.value += amount


class Histogram:
    """The number of observed values at or below each bound, and the sum of the values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """One count for each bound, and one count for values above all bounds; not cumulative."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Record one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulated(self) -> Iterator[tuple[float, int]]:
        """Yield each bound, infinity last, with the number of values at or below it."""
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            yield bound, seen


class Family(Generic[C]):
    """The children of one metric, by label values."""

    __slots__ = ("children", "kind", "labels", "name", "says")

    def __init__(self, name: str, says: str, labels: Sequence[str], kind: Callable[[], C]) -> None:
        self.name = name
        self.says = says
        self.labels = tuple(labels)
        self.children: dict[tuple[str, ...], C] = {}
        self.kind = kind
        """The function that creates a child."""

    def child(self, *values: str) -> C:
        """Return the child with these label values; create it, at zero, if it does not exist."""
        if len(values) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {values}")
        found = self.children.get(values)
        if found is None:
            found = self.children[values] = self.kind()
        return found


def counters(name: str, says: str, *labels: str) -> Family[Counter]:
    """Return a family of counters; a family without labels already has its only child."""
    family = Family(name, says, labels, Counter)
    if not labels:
        family.child()
    return family


def histograms(
    name: str, says: str, *labels: str, bounds: Sequence[float] = LATENCY_BOUNDS_S
) -> Family[Histogram]:
    """Return a family of histograms; a family without labels already has its only child."""
    family = Family(name, says, labels, lambda: Histogram(bounds))
    if not labels:
        family.child()
    return family
