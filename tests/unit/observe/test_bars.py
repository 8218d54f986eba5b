"""Bars, sparklines and the text beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.observe.bars import ASCII, DONE, LEVELS, TO_DO, bar, shares, sparkline
from strata.observe.words import figure, span


@given(st.floats(-1, 2), st.integers(2, 200))
def test_a_bar_is_full_at_1_only_and_empty_at_0_only(ratio: float, width: int) -> None:
    done, to_do = bar(ratio, width)
    assert len(done) + len(to_do) == width
    assert (to_do == "") == (ratio >= 1)
    assert (done == "") == (ratio <= 0)


@given(st.lists(st.floats(0, 1e9), max_size=20), st.integers(1, 1000))
def test_shares_sum_to_the_whole(parts: list[float], total: int) -> None:
    given_ = shares(parts, total)
    assert len(given_) == len(parts)
    assert min(given_, default=0) >= 0
    whole = sum(parts)
    assert sum(given_) == (total if whole > 0 else 0)
    for part, share in zip(parts, given_, strict=True):
        assert whole == 0 or abs(share - total * part / whole) < 1 + 1e-6


@given(st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), max_size=700), st.integers(1, 60))
def test_a_sparkline_is_as_wide_as_it_may_be(values: list[float | None], width: int) -> None:
    drawn = sparkline(values, width)
    assert len(drawn) <= width
    assert set(drawn) <= {*LEVELS, " "}
    assert (drawn == "") == all(value is None for value in values)


def test_a_sparkline_follows_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == LEVELS
    assert sparkline([1.0, None, 2.0], 8) == "▁ █"
    assert sparkline([5.0, 5.0], 8) == "▄▄"
    assert sparkline([0.0, 0.0, 10.0, 10.0], 2) == "▁█"


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (0, "0 s"),
        (48_400, "48 s"),
        (192_000, "3 min 12 s"),
        (9_060_000, "2 h 31 min"),
        (3.6e6, "1 h"),
        (4e8, "4 d 15 h"),
    ],
)
def test_a_span_has_two_units(milliseconds: float, words: str) -> None:
    assert span(milliseconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0.00"),
        (5, "5.00"),
        (27.42, "27.4"),
        (99.97, "100"),
        (1204.4, "1,204"),
        (0.0312, "0.0312"),
        (1.5e-5, "1.5e-05"),
    ],
)
def test_figures_are_rounded_to_readable_digits(value: float, words: str) -> None:
    assert figure(value) == words


def test_every_drawing_character_has_an_ascii_replacement() -> None:
    assert f"{LEVELS}{DONE}{TO_DO}▓▒░▚·…▲▼".translate(ASCII).isascii()
