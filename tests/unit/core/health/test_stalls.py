"""Stalled ranks, the rank to blame for a stall, and slow ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.health.attribution import STOPPED, RankReport, suspects
from strata.core.health.stalls import (
    FIRST_OTHER_S,
    FIRST_S,
    STEP,
    RankPace,
    StallLimits,
    kind_of,
)
from tests.not_none import not_none

LIMITS = StallLimits.derive(5.0)


def stepping(steps: int, each_s: float, *, phase: str = "step") -> tuple[RankPace, float]:
    """Return a rank's pace after `steps` steps, and the time of the last step."""
    pace = RankPace()
    for step in range(steps + 1):
        pace.observe(step, phase, step * each_s)
    return pace, steps * each_s


@pytest.mark.parametrize(
    ("phase", "kind"),
    [("", STEP), ("train", STEP), ("Step 3", STEP), ("eval 3/10", "eval"), ("save: writing", "save")],
)
def test_a_phase_is_its_first_word(phase: str, kind: str) -> None:
    assert kind_of(phase) == kind


def test_a_rank_that_reported_nothing_never_stalls() -> None:
    assert RankPace().stall(1e9, LIMITS) is None


def test_a_stall_gives_its_step_phase_and_reason() -> None:
    pace, now = stepping(10, 2.0)
    stall = not_none(pace.stall(now + 20.1, LIMITS))
    assert (stall.step, stall.phase) == (10, "step")
    assert (
        stall.reason == "no progress at step 10 (step) for 20 s; its limit is 20 s: 10 times the usual 2.0 s"
    )


@pytest.mark.parametrize(
    ("steps", "each_s", "limit_s"),
    [(10, 2.0, 20.0), (10, 0.01, 10.0), (2, 1.0, FIRST_S[STEP])],
    ids=["ten times the median", "not less than the knob says", "the first steps compile"],
)
def test_steps_have_a_limit(steps: int, each_s: float, limit_s: float) -> None:
    pace, now = stepping(steps, each_s)
    assert pace.stall(now + limit_s - 0.1, LIMITS) is None
    assert pace.stall(now + limit_s + 0.1, LIMITS) is not None
    assert not pace.observe(steps, "step", now + limit_s), "a word said again is no movement"
    assert pace.stall(now + limit_s + 0.1, LIMITS) is not None


def test_one_slow_step_does_not_move_the_limit() -> None:
    pace, now = stepping(10, 2.0)
    pace.observe(11, "step", now + 19.0)
    assert pace.usual_s() == 2.0
    assert pace.last_step_s == 19.0


def test_each_phase_has_its_own_stall_limit_and_any_report_restarts_it() -> None:
    pace, now = stepping(10, 1.0)
    pace.observe(10, "eval 1/2", now)
    assert pace.stall(now + FIRST_OTHER_S - 1, LIMITS) is None, "an evaluation is no step"
    pace.observe(10, "eval 2/2", now + 30.0)
    pace.observe(10, "step", now + 60.0)
    assert pace.usual_s("eval") == 60.0, "the stay in the phase, not its last word"
    pace.observe(11, "step", now + 61.0)
    assert pace.usual_s() == 1.0
    pace.observe(11, "eval", now + 61.0)
    assert pace.stall(now + 61 + 599, LIMITS) is None
    assert pace.stall(now + 61 + 601, LIMITS) is not None, "ten times as long as the first evaluation"


def test_the_time_of_steps_reported_together_is_divided() -> None:
    pace = RankPace()
    for step in range(0, 50, 10):
        pace.observe(step, "train", step * 0.1)
    assert pace.usual_s() == pytest.approx(0.1)


def test_a_configured_stall_limit_replaces_the_derived_one() -> None:
    limits = StallLimits.derive(5.0, fixed_s={"eval": 3.0, STEP: 600.0})
    pace, now = stepping(10, 1.0)
    assert pace.stall(now + 599, limits) is None
    pace.observe(10, "eval", now)
    assert not_none(pace.stall(now + 3.5, limits)).reason.endswith("as configured")


def test_the_watchers_own_pause_is_not_counted_as_a_stall() -> None:
    pace, now = stepping(10, 1.0)
    pace.forgive(100.0)
    assert pace.stall(now + 105, LIMITS) is None
    assert pace.stall(now + 111, LIMITS) is not None


# -- the rank to blame


def ranks(count: int = 4, **odd: Mapping[int, object]) -> list[RankReport]:
    """Return ranks stalled at step 8; `odd`: by field, the ranks that differ, and their values."""
    changes = [{name: of[rank] for name, of in odd.items() if rank in of} for rank in range(count)]
    return [
        replace(RankReport(rank=rank, step=8, phase="step", age_ms=0), **change)  # type: ignore[arg-type]  # fields by name
        for rank, change in enumerate(changes)
    ]


GRAPH = dict.fromkeys(range(4), "backward (graph.py)")


@pytest.mark.parametrize(
    ("leader_state", "named", "how"),
    [
        (ranks(step={2: 7}), (2,), "the others got beyond step 7"),
        (ranks(phase={1: "data"}), (1,), "most others do something else at the same step"),
        (ranks(waits={0: True, 1: True, 2: True}), (3,), "the others wait for them"),
        (ranks(waits={0: True, 2: True, 3: True}, process={3: STOPPED}), (3,), "the others wait for them"),
        (ranks(where=GRAPH | {2: "fetch (loader.py)"}), (2,), "most others are in backward (graph.py)"),
        (ranks(2, where={0: "a", 1: "b"}), (0, 1), "only their stacks tell them apart"),
        (ranks(3), (0, 1, 2), "only their stacks tell them apart"),
        (ranks(1), (0,), ""),
        ([], (), ""),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(
    leader_state: list[RankReport], named: tuple[int, ...], how: str
) -> None:
    assert suspects(leader_state) == (named, how)


@pytest.mark.parametrize(("each_s", "late_s"), [(0.2, 2.0), (1.0, 3.0)], ids=["two seconds", "three steps"])
def test_a_rank_is_late_long_before_its_stall_limit(each_s: float, late_s: float) -> None:
    pace, now = stepping(10, each_s)
    assert pace.late_s(now + late_s - 0.1) is None
    assert pace.late_s(now + late_s + 0.1) == pytest.approx(late_s + 0.1)


def test_no_rank_is_late_before_its_usual_step_time_is_known() -> None:
    pace, now = stepping(2, 0.2)
    assert pace.late_s(now + 500) is None, "its first steps may compile"
    pace.observe(2, "eval", now)
    assert pace.late_s(now + 500) is None


@given(
    st.lists(
        st.builds(
            RankReport,
            age_ms=st.just(0),
            rank=st.integers(0, 99),
            step=st.integers(0, 3),
            phase=st.sampled_from(["step", "data", "save"]),
            waits=st.booleans(),
        ),
        min_size=1,
        unique_by=lambda each: each.rank,
    )
)
def test_at_least_one_rank_and_only_stalled_ranks_are_named(leader_state: list[RankReport]) -> None:
    named, _how = suspects(leader_state)
    assert named
    assert set(named) <= {each.rank for each in leader_state}
