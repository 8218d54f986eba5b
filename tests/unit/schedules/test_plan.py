"""Schedules: a plan depends only on its seed."""

from __future__ import annotations

from tests.schedules.plan import Kind, make_plan

ALL = frozenset(Kind)


def test_a_seed_gives_the_same_plan_again() -> None:
    assert make_plan(3, kinds=ALL) == make_plan(3, kinds=ALL)
    assert make_plan(3, kinds=ALL) != make_plan(4, kinds=ALL)


def test_a_dozen_seeds_cover_every_kind_of_event() -> None:
    plans = [make_plan(seed, kinds=ALL) for seed in range(1, 13)]
    assert {event.kind for plan in plans for event in plan.events} == ALL
    assert {plan.slots for plan in plans} == {1, 2}


def test_only_the_requested_kinds_are_planned() -> None:
    plan = make_plan(8, kinds=frozenset({Kind.SCALE}), events=20)
    assert {event.kind for event in plan.events} == {Kind.SCALE}
    assert {event.amount for event in plan.events} == {1, 2, 3}
