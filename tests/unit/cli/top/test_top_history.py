"""Merging the pieces of history that `strata top` reads, and the length it keeps."""

from __future__ import annotations

from typing import Any

from strata.cli.top.seen import KEPT, merged


def series(begin: int, *values: float | None, name: str = "loss") -> dict[str, Any]:
    return {
        "from_unix_ms": begin,
        "interval_ms": 1000,
        "series": {name: {"unit": "", "values": list(values)}},
    }


def test_a_newer_history_replaces_the_span_it_covers() -> None:
    found = merged(series(0, 1.0, 2.0, None), series(2000, 3.0, 4.0))
    assert found == series(0, 1.0, 2.0, 3.0, 4.0)


def test_a_series_that_begins_or_ends_has_gaps() -> None:
    found = merged(series(0, 1.0, 2.0), series(2000, 5.0, name="lr"))
    assert found["series"]["loss"]["values"] == [1.0, 2.0, None]
    assert found["series"]["lr"]["values"] == [None, None, 5.0]


def test_no_more_than_ten_minutes_are_kept() -> None:
    history: Any = series(0, *range(KEPT))
    history = merged(history, series(1000 * KEPT, 1.0, 2.0))
    assert len(history["series"]["loss"]["values"]) == KEPT
    assert history["from_unix_ms"] == 2000
    assert history["series"]["loss"]["values"][-1] == 2.0


def test_after_a_long_gap_only_the_new_history_is_kept() -> None:
    assert merged(series(0, 1.0), series(10**9, 2.0)) == series(10**9, 2.0)


def test_an_empty_history_changes_nothing() -> None:
    nothing = {"from_unix_ms": 0, "interval_ms": 1000, "series": {}}
    assert merged(series(0, 1.0), nothing) == series(0, 1.0)
    assert merged(None, nothing) == nothing
