"""When a rank stands still, whose fault it is, and who is slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.stalls import (
    FIRST_OTHER_S,
    FIRST_S,
    STEP,
    RankPace,
    StallLimits,
    Standing,
    kind_of,
    suspects,
)
from tests.not_none import not_none

LIMITS = StallLimits.derive(5.0)


def stepping(steps: int, each_s: float, *, phase: str = "step") -> tuple[RankPace, float]:
    """Return a rank that did so many steps, and the time of the last."""
    pace = RankPace()
    for step in range(steps + 1):
        pace.hear(step, phase, step * each_s)
    return pace, steps * each_s


@pytest.mark.parametrize(
    ("phase", "kind"),
    [("", STEP), ("train", STEP), ("Step 3", STEP), ("eval 3/10", "eval"), ("save: writing", "save")],
)
def test_a_phase_is_its_first_word(phase: str, kind: str) -> None:
    assert kind_of(phase) == kind


def test_a_rank_that_said_nothing_never_stands_still() -> None:
    assert RankPace().stall(1e9, LIMITS) is None


def test_the_limit_of_a_step_is_k_times_the_median() -> None:
    pace, now = stepping(10, 2.0)
    assert pace.usual_s() == 2.0
    assert pace.stall(now + 20.0, LIMITS) is None
    stall = not_none(pace.stall(now + 20.1, LIMITS))
    assert (stall.step, stall.phase, stall.limit_s) == (10, "step", 20.0)
    assert (
        stall.reason == "no progress at step 10 (step) for 20 s; its limit is 20 s: 10 times the usual 2.0 s"
    )


def test_quick_steps_are_not_held_to_less_than_the_knob_says() -> None:
    pace, now = stepping(10, 0.01)
    assert pace.stall(now + 9.9, LIMITS) is None
    assert pace.stall(now + 10.1, LIMITS) is not None


def test_one_slow_step_does_not_move_the_limit() -> None:
    pace, now = stepping(10, 2.0)
    pace.hear(11, "step", now + 19.0)
    assert pace.usual_s() == 2.0
    assert pace.last_step_s == 19.0


def test_the_first_steps_have_a_generous_limit() -> None:
    pace, now = stepping(2, 1.0)
    assert pace.stall(now + FIRST_S[STEP] - 1, LIMITS) is None
    assert pace.stall(now + FIRST_S[STEP] + 1, LIMITS) is not None


def test_another_phase_counts_for_itself_and_moves_with_every_word() -> None:
    pace, now = stepping(10, 1.0)
    pace.hear(10, "eval 1/2", now)
    assert pace.stall(now + FIRST_OTHER_S - 1, LIMITS) is None, "an evaluation is no step"
    pace.hear(10, "eval 2/2", now + 30.0)
    pace.hear(10, "step", now + 60.0)
    assert pace.usual_s("eval") == 60.0, "the stay in the phase, not its last word"
    pace.hear(11, "step", now + 61.0)
    assert pace.usual_s() == 1.0
    pace.hear(11, "eval", now + 61.0)
    assert pace.stall(now + 61 + 599, LIMITS) is None
    assert pace.stall(now + 61 + 601, LIMITS) is not None, "ten times as long as the first evaluation"


def test_steps_that_were_told_together_are_divided() -> None:
    pace = RankPace()
    for step in range(0, 50, 10):
        pace.hear(step, "train", step * 0.1)
    assert pace.usual_s() == pytest.approx(0.1)


def test_a_set_limit_counts_alone() -> None:
    limits = StallLimits.derive(5.0, fixed_s={"eval": 3.0, STEP: 600.0})
    pace, now = stepping(10, 1.0)
    assert pace.stall(now + 599, limits) is None
    pace.hear(10, "eval", now)
    assert not_none(pace.stall(now + 3.5, limits)).reason.endswith("as it was set")


def test_our_own_stall_is_nobody_elses() -> None:
    pace, now = stepping(10, 1.0)
    pace.forgive(100.0)
    assert pace.stall(now + 105, LIMITS) is None
    assert pace.stall(now + 111, LIMITS) is not None


def test_a_word_said_again_is_no_movement() -> None:
    pace, now = stepping(10, 1.0)
    assert not pace.hear(10, "step", now + 9)
    assert pace.stall(now + 10.5, LIMITS) is not None


# -- whose fault


def test_who_is_behind_holds_up_the_others() -> None:
    standing = [Standing(rank=r, step=7 if r == 2 else 8, phase="step") for r in range(4)]
    assert suspects(standing) == ((2,), "the others got beyond step 7")


def test_who_does_something_else_at_the_same_step_holds_up_the_others() -> None:
    standing = [Standing(rank=r, step=8, phase="data" if r == 1 else "step") for r in range(4)]
    assert suspects(standing) == ((1,), "most others do something else at the same step")


def test_who_waits_at_a_barrier_is_held_up() -> None:
    standing = [Standing(rank=r, step=8, phase="save", waits=r != 3) for r in range(4)]
    assert suspects(standing) == ((3,), "the others wait for them")


def test_a_rank_is_late_long_before_that_is_a_stall_and_never_while_nothing_is_usual() -> None:
    pace, now = stepping(10, 0.2)
    assert pace.late_s(now + 1.9) is None
    assert pace.late_s(now + 2.1) == pytest.approx(2.1)
    pace, now = stepping(10, 1.0)
    assert pace.late_s(now + 2.9) is None, "three times the usual"
    assert pace.late_s(now + 3.1) == pytest.approx(3.1)
    pace, now = stepping(2, 0.2)
    assert pace.late_s(now + 500) is None, "its first steps may compile"
    pace.hear(2, "eval", now)
    assert pace.late_s(now + 500) is None


def test_a_rank_that_can_do_nothing_holds_up_the_others_whatever_they_do() -> None:
    standing = [Standing(rank=r, step=8, phase="step", waits=r != 1, unable=r == 3) for r in range(4)]
    assert suspects(standing) == ((3,), "the others wait for them")


def test_who_stands_elsewhere_than_most_holds_up_the_others() -> None:
    standing = [
        Standing(rank=r, step=8, phase="step", where="fetch (loader.py)" if r == 2 else "backward (graph.py)")
        for r in range(4)
    ]
    assert suspects(standing) == ((2,), "most others stand in backward (graph.py)")
    assert suspects(standing[1:3])[0] == (1, 2), "of two there is no majority"


def test_what_cannot_be_told_apart_is_named_whole() -> None:
    standing = [Standing(rank=r, step=8, phase="step") for r in range(3)]
    assert suspects(standing) == ((0, 1, 2), "nothing tells them apart but their stacks")
    assert suspects(standing[:1]) == ((0,), "")
    assert suspects([]) == ((), "")


@given(
    st.lists(
        st.builds(
            Standing,
            rank=st.integers(0, 99),
            step=st.integers(0, 3),
            phase=st.sampled_from(["step", "data", "save"]),
            waits=st.booleans(),
        ),
        min_size=1,
        unique_by=lambda each: each.rank,
    )
)
def test_somebody_is_always_named_and_nobody_who_does_not_stand_still(standing: list[Standing]) -> None:
    named, _how = suspects(standing)
    assert named
    assert set(named) <= {each.rank for each in standing}
