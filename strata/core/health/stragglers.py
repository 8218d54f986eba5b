"""Straggler detection: two scores per rank, and which ranks are slow enough to be named.

In synchronous training all ranks wait for the slowest in every step, so steps take the same time on all ranks. A
rank is judged by its own cost of a step: the compute time of its trainer's thread, and the wait for its batches.

The two scores are those of NVIDIA's resiliency extension. A score of 1 is the speed of the reference, 0 is
infinitely slow:

- *relative*: the compute time of the fastest rank divided by that of this rank;
- *own*: this rank's best compute time divided by its present compute time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from statistics import median, median_low
from typing import Final

WINDOW_S: Final = 2.0
LEAST_STEPS: Final = 5
MOST_STEPS: Final = 64
"""A median covers the steps of the last `WINDOW_S`, from 5 to 64 of them. So pauses do not affect the median."""
WARM_UP_STEPS: Final = 5
"""The first steps of a rank in a generation, which compile and fill caches, do not count."""
BEST_OF_STEPS: Final = 16
"""The best time is a median of this many steps in a row: the median of a few is sometimes small by chance."""
SLOWED_FACTOR: Final = 1.25
"""A rank's steps have become slower, or faster, if their cost changed by this factor, up or down."""
SLOW_FACTOR: Final = 1.5
"""A rank is slow if its steps cost at least this many times the median of the ranks that it is compared with…"""
SLOW_LEAST_S: Final = 0.01
"""…and at least this many seconds more than that median."""
MIN_RANKS: Final = 3
"""The fewest ranks that are compared: of two ranks it is impossible to tell which one is slow."""
MOST_REPORTED: Final = 64
"""Only this many of the slowest ranks are compared with all others. If more ranks are slow, they are no stragglers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The costs of a rank's steps up to `step`; medians cover its newest steps. `best_compute_s`: 0 while unknown."""

    compute_s: float
    data_wait_s: float
    median_compute_s: float
    median_data_wait_s: float
    best_compute_s: float = 0.0
    step: int = 0
    cheaper_s: float = 0.0
    """The cost of the cheaper of the rank's last two steps."""
    steady_steps: int = 0
    """The number of steps since the cost last changed by more than `SLOWED_FACTOR`."""
    slowed_s: float = 0.0
    """How long its steps have cost more than before; 0 if they cost no more, or if this is unknown."""

    @property
    def median_s(self) -> float:
        """The total cost of a step, compute and wait."""
        return self.median_compute_s + self.median_data_wait_s

    @property
    def since_step(self) -> int:
        """The first step of the present cost level."""
        return self.step - self.steady_steps + 1

    @property
    def last_s(self) -> float:
        """The cost of the last step."""
        return self.compute_s + self.data_wait_s


class StepWindow:
    """One rank's steps in one generation. All times are arguments."""

    __slots__ = (
        "_best_compute_s",
        "_block",
        "_changed_step",
        "_computes_s",
        "_level_s",
        "_seen",
        "_slowed_since_s",
        "_step",
        "_steps",
        "_waits_s",
    )

    def __init__(self) -> None:
        self._step = -1
        self._seen = 0
        self._steps: deque[tuple[float, float, float]] = deque()
        """(completion time, compute time, wait for data) of the newest steps."""
        self._computes_s: list[float] = []
        self._waits_s: list[float] = []
        """The compute times and the waits of `_steps`, kept sorted so that a median needs no sorting per step."""
        self._block: list[float] = []
        self._best_compute_s = 0.0
        self._slowed_since_s: float | None = None
        self._level_s = 0.0
        """The cost of a step at its last change, in step `_changed_step`."""
        self._changed_step = 0

    @property
    def times(self) -> StepTimes | None:
        """The costs of the rank's steps, or None before the rank has made enough steps."""
        steps = self._steps
        if len(steps) < LEAST_STEPS:
            return None
        at_s, compute_s, data_wait_s = steps[-1]
        since_s = self._slowed_since_s
        return StepTimes(
            compute_s=compute_s,
            data_wait_s=data_wait_s,
            median_compute_s=_median_of_sorted(self._computes_s),
            median_data_wait_s=_median_of_sorted(self._waits_s),
            best_compute_s=self._best_compute_s,
            step=self._step,
            cheaper_s=min(compute_s + data_wait_s, sum(steps[-2][1:])),
            steady_steps=self._step - self._changed_step + 1,
            slowed_s=max(1e-6, at_s - since_s) if since_s is not None else 0.0,
        )

    def note(self, step: int, compute_s: float, data_wait_s: float, now_s: float) -> None:
        """Record a complete step; a step that is already recorded, or that cost nothing, is ignored."""
        if step == self._step or compute_s + data_wait_s <= 0:
            return
        self._step = step
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            self._changed_step = step + 1
            return
        steps = self._steps
        steps.append((now_s, compute_s, data_wait_s))
        insort(self._computes_s, compute_s)
        insort(self._waits_s, data_wait_s)
        while len(steps) > MOST_STEPS or (len(steps) > LEAST_STEPS and steps[0][0] < now_s - WINDOW_S):
            self._forget_oldest()
        self._note_best(compute_s)
        if len(steps) >= LEAST_STEPS:
            self._note_level(step, now_s)

    def _forget_oldest(self) -> None:
        _, compute_s, data_wait_s = self._steps.popleft()
        del self._computes_s[bisect_left(self._computes_s, compute_s)]
        del self._waits_s[bisect_left(self._waits_s, data_wait_s)]

    def _note_level(self, step: int, now_s: float) -> None:
        median_s = _median_of_sorted(self._computes_s) + _median_of_sorted(self._waits_s)
        before_s = self._level_s
        if before_s / SLOWED_FACTOR <= median_s <= before_s * SLOWED_FACTOR:
            return
        self._level_s = median_s
        if before_s:
            self._changed_step = step
            self._slowed_since_s = now_s if median_s > before_s else None

    def _note_best(self, compute_s: float) -> None:
        self._block.append(compute_s)
        if len(self._block) == BEST_OF_STEPS:
            block_s = median(self._block)
            self._block.clear()
            self._best_compute_s = min(self._best_compute_s or block_s, block_s)


def _median_of_sorted(values: Sequence[float]) -> float:
    """Return `median_low` of sorted values."""
    return values[(len(values) - 1) // 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A rank's speed, from 0 to 1: against the fastest rank, and against its own best. None: unknown."""

    relative: float | None
    own: float | None


def scores(times: Mapping[int, StepTimes]) -> dict[int, Scores]:
    """Return the ranks' scores by their compute times, without any wait."""
    known = [each.median_compute_s for each in times.values() if each.median_compute_s > 0]
    fastest_s = min(known, default=0.0)
    return {rank: _scores(each, fastest_s) for rank, each in times.items()}


def _scores(times: StepTimes, fastest_s: float) -> Scores:
    now_s, best_s = times.median_compute_s, times.best_compute_s
    if now_s <= 0:
        return Scores(relative=None, own=None)
    return Scores(relative=fastest_s / now_s, own=min(1.0, best_s / now_s) if best_s > 0 else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A rank whose steps cost more than those of others."""

    rank: int
    times: float
    """Its step cost, divided by the median cost of the compared ranks."""
    compute_more_s: float
    data_more_s: float
    """By how many seconds a step its compute time and its wait for data exceed the medians of the others."""
    slowed_s: float


def stragglers(times: Mapping[int, StepTimes]) -> list[Slow]:
    """Return the ranks whose steps cost `SLOW_FACTOR` times those of most others, the slowest first.

    Reports of ranks differ in age, and all ranks may have become slower since the oldest report. So two ranks are
    compared only if the present cost level of both covers a common step. A rank must be comparable with half of all
    ranks. No rank is slow if more than half of all ranks are as slow.
    """
    known = {rank: each for rank, each in times.items() if each.median_s > 0}
    if len(known) < MIN_RANKS:
        return []
    least_s = min(each.median_s for each in known.values())
    suspects = [rank for rank, each in known.items() if _is_slow(each.median_s, least_s)]
    slowest = nlargest(MOST_REPORTED, suspects, key=lambda rank: known[rank].median_s)
    slow = [found for rank in slowest if (found := _compared(rank, known)) is not None]
    return sorted(slow, key=lambda each: (-each.times, each.rank))


def _compared(rank: int, known: Mapping[int, StepTimes]) -> Slow | None:
    mine = known[rank]
    others = [each for each in known.values() if each is not mine and _overlap(mine, each)]
    if len(others) < MIN_RANKS - 1 or 2 * len(others) < len(known) - 1:
        return None
    usual_s = median_low([*(each.median_s for each in others), mine.median_s])
    if usual_s <= 0 or not _is_slow(mine.median_s, usual_s):
        return None
    # a change common to all ranks reaches their medians a step or two apart, but their last steps together
    last_s = median_low(each.last_s for each in others)
    if mine.median_s < SLOW_FACTOR * last_s or mine.cheaper_s < SLOWED_FACTOR * usual_s:
        return None
    return Slow(
        rank=rank,
        times=mine.median_s / usual_s,
        compute_more_s=mine.median_compute_s - median_low(each.median_compute_s for each in others),
        data_more_s=mine.median_data_wait_s - median_low(each.median_data_wait_s for each in others),
        slowed_s=mine.slowed_s,
    )


def _is_slow(step_s: float, usual_s: float) -> bool:
    return step_s >= SLOW_FACTOR * usual_s and step_s - usual_s >= SLOW_LEAST_S


def _overlap(one: StepTimes, other: StepTimes) -> bool:
    """Return whether there is a step that both ranks made at their present cost."""
    return max(one.since_step, other.since_step) <= min(one.step, other.step)
