"""The compute and wait time of a rank's steps, and slow ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median_low

import pytest

from strata.core.health.stragglers import (
    BEST_OF_STEPS,
    LEAST_STEPS,
    MOST_STEPS,
    WARM_UP_STEPS,
    WINDOW_S,
    StepTimes,
    StepWindow,
    scores,
    stragglers,
)
from tests.not_none import not_none


def steady(
    compute_s: float, wait_s: float = 0.0, *, best_s: float = 0.0, step: int = 200, steps: int = 100
) -> StepTimes:
    return StepTimes(
        compute_s=compute_s,
        data_wait_s=wait_s,
        median_compute_s=compute_s,
        median_data_wait_s=wait_s,
        best_compute_s=best_s,
        step=step,
        cheaper_s=compute_s + wait_s,
        steady_steps=steps,
    )


def window(costs_s: list[tuple[float, float]], *, each_s: float = 0.5) -> StepWindow:
    found = StepWindow()
    for number, (compute_s, wait_s) in enumerate(costs_s):
        found.note(number + 1, compute_s, wait_s, 100 + number * each_s)
    return found


# -- one rank


def test_nothing_is_known_before_a_rank_has_warmed_up() -> None:
    first = [(9.0, 0.0)] * WARM_UP_STEPS
    assert window([*first, *[(0.1, 0.0)] * (LEAST_STEPS - 1)]).times is None
    assert not_none(window([*first, *[(0.1, 0.0)] * LEAST_STEPS]).times).median_compute_s == 0.1, (
        "the first steps compile"
    )


def test_a_median_is_over_the_steps_of_two_seconds_so_that_a_pause_does_not_show() -> None:
    times = not_none(window([*[(0.1, 0.02)] * 60, (3.0, 0.02)]).times)
    assert (times.compute_s, times.median_compute_s, times.median_data_wait_s) == (3.0, 0.1, 0.02)
    assert times.slowed_s == 0


def test_a_rank_that_slows_down_reports_since_when() -> None:
    slow = not_none(window([*[(0.1, 0.0)] * 60, *[(0.3, 0.0)] * 8]).times)
    assert slow.best_compute_s == 0.1
    assert slow.median_compute_s == 0.3
    assert 4 <= slow.steady_steps <= 7
    assert 1.0 < slow.slowed_s < 4.0
    again = not_none(window([*[(0.1, 0.0)] * 60, *[(0.3, 0.0)] * 8, *[(0.1, 0.0)] * 8]).times)
    assert again.slowed_s == 0
    assert 4 <= again.steady_steps <= 7


@pytest.mark.parametrize(("steps", "best_s"), [(BEST_OF_STEPS - 1, 0.0), (BEST_OF_STEPS, 0.1)])
def test_the_best_needs_many_steps_in_a_row(steps: int, best_s: float) -> None:
    times = window([(0.1, 0.0)] * (WARM_UP_STEPS + steps)).times
    assert not_none(times).best_compute_s == best_s


def test_a_repeated_step_and_a_step_without_cost_do_not_count() -> None:
    found = StepWindow()
    for _ in range(50):
        found.note(7, 0.1, 0.0, 1.0)
        found.note(8, 0.0, 0.0, 1.0)
    assert found.times is None


def test_the_medians_are_those_of_the_steps_of_two_seconds() -> None:
    """Equal values and a full window could make the incrementally sorted lists differ from the steps."""
    for seed in range(40):
        chance = random.Random(seed)
        found, noted, now_s = StepWindow(), [], 0.0
        for step in range(1, 250):
            now_s += chance.choice([0.001, 0.02, 0.3, 3.0]) if chance.random() < 0.1 else 0.02
            cost = (chance.choice([0.1, 0.2, chance.random()]), chance.choice([0.0, 0.01]))
            found.note(step, *cost, now_s)
            if step > WARM_UP_STEPS:
                noted.append((now_s, *cost))
            newest = noted[-MOST_STEPS:]
            recent = [each for each in newest if each[0] >= now_s - WINDOW_S]
            window = recent if len(recent) >= LEAST_STEPS else newest[-LEAST_STEPS:]
            if len(window) < LEAST_STEPS:
                assert found.times is None
                continue
            times = not_none(found.times)
            assert times.median_compute_s == median_low(each[1] for each in window)
            assert times.median_data_wait_s == median_low(each[2] for each in window)
            assert (times.compute_s, times.data_wait_s) == cost
            assert times.cheaper_s == min(sum(each[1:]) for each in window[-2:])


# -- all ranks


def test_scores_are_against_the_fastest_and_against_the_own_best_without_the_wait_for_data() -> None:
    found = scores(
        {0: steady(0.1, 9.0, best_s=0.1), 1: steady(0.2, best_s=0.1), 2: steady(0.4), 3: steady(0.0, 1.0)}
    )
    assert [(each.relative, each.own) for each in found.values()] == [
        (1.0, 1.0),
        (0.5, 0.5),
        (0.25, None),
        (None, None),
    ]
    assert scores({}) == {}


@pytest.mark.parametrize(
    ("costs_s", "named"),
    [
        ((1.0, 1.1, 0.9, 2.0, 4.0), {4: 3.64, 3: 1.82}),
        ((), {}),
        ((1.0, 9.0), {}),  # with two ranks, neither is known to be the slow rank
        ((1.0,) * 8, {}),
        ((0.004, 0.004, 0.004, 0.012), {}),  # a few milliseconds are no evidence
        ((0.004, 0.004, 0.004, 0.018), {3: 4.5}),
        ((1, 1, 2, 2), {2: 2.0, 3: 2.0}),  # half of all ranks may be slow
        ((1, 2, 2), {}),  # if more than half differ, no rank counts as slow
    ],
)
def test_a_straggler_is_slower_than_most(costs_s: tuple[float, ...], named: dict[int, float]) -> None:
    slow = stragglers(dict(enumerate(map(steady, costs_s))))
    assert [(each.rank, round(each.times, 2)) for each in slow] == list(named.items())


def test_slow_compute_and_slow_data_loading_are_distinguished() -> None:
    (slow,) = stragglers({**{rank: steady(0.1, 0.01) for rank in range(4)}, 4: steady(0.11, 0.3)})
    assert (round(slow.compute_more_s, 3), round(slow.data_more_s, 3)) == (0.01, 0.29)


@pytest.mark.parametrize("then_s", [(0.3,), (0.3, 0.1)], ids=["slower", "slower and faster again"])
def test_a_common_change_of_pace_blames_no_rank_even_with_stale_reports(
    then_s: tuple[float, ...],
) -> None:
    chance = random.Random(5)
    ranks = 16
    windows = [StepWindow() for _ in range(ranks)]
    known: dict[int, list[StepTimes]] = {rank: [] for rank in range(ranks)}
    for step in range(1, 300):
        cost_s = (0.1, *then_s)[min(len(then_s), step // 100)]
        for rank, each in enumerate(windows):
            each.note(step, cost_s * chance.gauss(1, 0.05), 0.0, step * 0.2)
            if each.times is not None:
                known[rank].append(each.times)
        seen = {
            rank: reported[-1 - min(len(reported) - 1, chance.randrange(8))]
            for rank, reported in known.items()
            if reported
        }
        assert stragglers(seen) == [], step


def test_a_slow_rank_is_named_even_if_other_reports_are_a_second_old() -> None:
    others = {rank: steady(0.1, step=180, steps=150) for rank in range(8)}
    slow = steady(0.2, step=190, steps=5)
    assert stragglers(others | {8: slow}) == [], "nobody was heard of since it is slow"
    assert [each.rank for each in stragglers(others | {8: replace(slow, step=183)})] == [8]
