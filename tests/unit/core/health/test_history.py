from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.health.history import (
    HEAT_COLUMNS,
    HEAT_S,
    INTERVALS,
    Excerpt,
    Heat,
    JobHistory,
    Kind,
    Pace,
    percentile,
)

T = 1_700_000_000 // 15 * 15


def shown(history: JobHistory, name: str, interval_s: int, since_s: int, until_s: int) -> list[float | None]:
    values = history.excerpt(interval_s, since_s, until_s).series[name]
    return [None if math.isnan(value) else value for value in values]


@pytest.fixture
def history() -> JobHistory:
    return JobHistory()


def test_seconds_without_a_value_are_empty_and_an_interval_that_has_not_ended_is_not_shown(
    history: JobHistory,
) -> None:
    for second in (0, 1, 3):
        history.put(T + second, "x", second, Kind.LAST)
    assert shown(history, "x", 1, T, T + 4) == [0, 1, None, 3]
    assert shown(history, "x", 15, T, T + 14) == []
    assert shown(history, "x", 15, T, T + 15) == [3]
    with pytest.raises(KeyError):
        history.excerpt(7, T, T + 7)


@pytest.mark.parametrize(
    ("kind", "expected"), [(Kind.MEAN, 4.0), (Kind.LAST, 3.0), (Kind.MAX, 7.0), (Kind.SUM, 12.0)]
)
def test_values_of_one_interval_are_aggregated_by_kind(
    history: JobHistory, kind: Kind, expected: float
) -> None:
    for second, value in enumerate((2.0, 7.0, 3.0)):
        history.put(T + second, "x", value, kind)
    assert shown(history, "x", 15, T, T + 15) == [expected]


def test_values_older_than_the_ring_are_dropped(history: JobHistory) -> None:
    history.put(T, "x", 1, Kind.LAST)
    history.put(T + INTERVALS[1], "x", 2, Kind.LAST)
    assert shown(history, "x", 1, 0, T + INTERVALS[1] + 1) == [*[None] * (INTERVALS[1] - 1), 2]
    assert shown(history, "x", 15, T, T + 15) == [1]


def test_nan_and_infinite_values_are_left_out(history: JobHistory) -> None:
    for value in (math.nan, math.inf, -math.inf):
        history.put(T, "x", value, Kind.MEAN)
    assert "x" not in history.names


def test_a_peers_values_fill_only_missing_seconds(history: JobHistory) -> None:
    history.put(T + 3, "x", 30, Kind.LAST)
    received = Excerpt(interval_s=1, from_unix_s=T, series={"x": [1.0, math.nan, 3.0, 4.0, 5.0]})
    history.fill(received, before_s=T + 4)
    assert shown(history, "x", 1, T, T + 5) == [1, None, 3, 30, None]


def test_a_replica_that_knows_nothing_learns_all_from_a_peer() -> None:
    ours, theirs = JobHistory(), JobHistory()
    for second in range(2000):
        theirs.put(T + second, "x", second, Kind.LAST)
    for interval_s in INTERVALS:
        ours.fill(theirs.excerpt(interval_s, 0, T + 2000), before_s=T + 2000)
    for interval_s in INTERVALS:
        assert shown(ours, "x", interval_s, T, T + 1995) == shown(theirs, "x", interval_s, T, T + 1995)


@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(-50, 50)), max_size=60))
def test_the_rings_agree_with_a_table(puts: list[tuple[int, int]]) -> None:
    history, table, newest = JobHistory(), dict[int, float](), 0
    for second, value in sorted(puts, key=lambda each: each[0]):
        history.put(T + second, "x", value, Kind.LAST)
        table[second], newest = value, second
    if table:
        first = max(min(table), newest + 1 - INTERVALS[1])
        assert shown(history, "x", 1, T, T + newest + 1) == [table.get(s) for s in range(first, newest + 1)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1500), st.lists(st.sampled_from([1.0, 2.0, math.nan, math.inf]), max_size=700)
        ),
        max_size=4,
    ),
    st.lists(st.integers(700, 1500), max_size=5),
    st.integers(0, 2300),
)
def test_parts_of_peers_and_own_values_agree_with_a_table(
    parts: list[tuple[int, list[float]]], puts: list[int], before: int
) -> None:
    history, table = JobHistory(), dict[int, float]()
    for second in sorted(puts):
        history.put(T + second, "x", 9.0, Kind.LAST)
        table[second] = 9.0
    newest = max(table, default=None)
    for first, values in parts:
        history.fill(Excerpt(interval_s=1, from_unix_s=T + first, series={"x": values}), before_s=T + before)
        for second, value in enumerate(values, first):
            if second < before and math.isfinite(value):
                newest = second if newest is None else max(newest, second)
        for second, value in enumerate(values, first):
            kept = newest is not None and second > newest - INTERVALS[1]
            if kept and second < before and math.isfinite(value):
                table.setdefault(second, value)
    if newest is not None:
        found = history.excerpt(1, T, T + newest + 3)
        first = found.from_unix_s - T
        oldest = newest + 1 - INTERVALS[1]
        expected = [table.get(second) if second >= oldest else None for second in range(first, newest + 3)]
        assert [None if math.isnan(value) else value for value in found.series["x"]] == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(1, (1, 1, 1)), (2, (1, 2, 2)), (3, (2, 3, 3)), (10, (5, 9, 10)), (200, (100, 180, 198))],
)
def test_percentiles_are_those_of_the_nearest_rank(ranks: int, expected: tuple[int, int, int]) -> None:
    assert tuple(percentile(range(1, ranks + 1), percent) for percent in (50, 90, 99)) == expected


def test_the_heat_map_keeps_ten_minutes_and_is_empty_without_reports() -> None:
    heat = Heat(generation=2, ranks=3)
    heat.put(T, 0, 100)
    heat.put(T + 2, 0, 200)
    heat.put(T + 2 * HEAT_S, 2, 2**40)
    heat.put(T, 7, 1)
    begun = T // HEAT_S * HEAT_S
    end = begun + 3 * HEAT_S
    assert heat.columns(0, end) == (begun, [[200, None, None], [None] * 3, [None, None, 2**32 - 1]])
    assert heat.columns(0, end - 1) == (begun, [[200, None, None]]), "the last column still grows"
    assert heat.columns(begun + 1, end)[1] == [[None, None, 2**32 - 1]]
    heat.put(T + (HEAT_COLUMNS + 1) * HEAT_S, 1, 5)
    end = begun + 100 * HEAT_S
    assert heat.columns(0, end)[0] == begun + 2 * HEAT_S
    assert heat.columns(end, end) == (end, [])


def test_the_pace_covers_the_last_ten_seconds_and_falls_without_steps() -> None:
    pace = Pace()
    assert (pace.per_s(0.0), pace.since_s(0.0)) == (None, None)
    for second in range(30):
        pace.note(float(second), 5 * second)
    assert pace.per_s(29.5) == pytest.approx(5.0)
    assert pace.since_s(29.5) == 0.5
    assert pace.per_s(49.0) == pytest.approx(5 * 10 / 30, rel=0.2)


def test_a_pace_needs_two_steps_and_restarts_with_a_generation() -> None:
    pace, found = Pace(), []
    for now_s, step in ((0.0, 7), (60.0, 8), (60.0, 8), (100.0, 4)):
        pace.note(now_s, step)
        found.append(pace.per_s(now_s + 1))
    assert found == [None, pytest.approx(1 / 60), pytest.approx(1 / 60), None]
