"""Rank kills: a plan depends only on its seed."""

from __future__ import annotations

import pytest

from tests.rank_kills.plan import Moment, make_plan


def test_a_seed_gives_the_same_plan_again() -> None:
    assert make_plan(3, 25) == make_plan(3, 25)
    assert make_plan(3, 25) != make_plan(4, 25)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_covers_all_moments_and_ranks_and_first_kills_after_a_save(seed: int) -> None:
    plan = make_plan(seed, 25)
    assert [kill.number for kill in plan] == list(range(1, 26))
    assert {kill.moment for kill in plan[:4]} == set(Moment)
    assert {kill.rank for kill in plan} == {0, 1}
    assert plan[0].moment is not Moment.RESTORING
