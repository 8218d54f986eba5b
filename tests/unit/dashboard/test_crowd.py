from __future__ import annotations

import pytest

from strata.dashboard.crowd import Crowd


@pytest.fixture
def crowd() -> Crowd[int]:
    return Crowd(most=4, per_address=2)


def test_one_more_of_an_address_takes_the_place_of_its_oldest(crowd: Crowd[int]) -> None:
    assert [crowd.enter(number, "a") for number in (1, 2, 3, 4)] == [None, None, 1, 2]
    assert crowd.enter(5, "b") is None


def test_one_more_of_all_takes_the_place_of_the_oldest_of_the_address_with_the_most(
    crowd: Crowd[int],
) -> None:
    for number, address in enumerate("abbc", 1):
        assert crowd.enter(number, address) is None

    assert crowd.enter(5, "d") == 2
    assert crowd.enter(6, "e") == 1, "all have one: the oldest goes"


def test_one_that_left_makes_room(crowd: Crowd[int]) -> None:
    crowd.enter(1, "a")
    crowd.enter(2, "a")
    crowd.leave(1)
    crowd.leave(1)

    assert crowd.enter(3, "a") is None
    assert crowd.enter(4, "a") == 2
