from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.words import ranks_text


@pytest.mark.parametrize(
    ("ranks", "most", "text"),
    [
        ([], None, ""),
        ([5, 5], None, "5"),
        ([7, 0, 1, 2, 9], None, "0-2, 7, 9"),
        (range(0, 40, 2), 8, "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_are_written_as_runs_and_many_of_them_counted(
    ranks: list[int], most: int | None, text: str
) -> None:
    assert ranks_text(ranks, most=most) == text


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_equal_sets_and_only_they_have_equal_texts(one: set[int], other: set[int]) -> None:
    assert (ranks_text(one) == ranks_text(other)) == (one == other)
