from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import ConfigError
from strata_chaos import faults
from strata_chaos.faults.schedule import PlannedFault, plan
from strata_chaos.scenario import RandomFaults, Scenario, ScriptedFault

USABLE = ("kill-leader", "freeze-leader")


def made(
    *script: ScriptedFault, drawn: RandomFaults | None = None, seed: int = 1, duration_s: float = 60.0
) -> tuple[PlannedFault, ...]:
    scenario = Scenario(name="s", title="t", duration_s=duration_s, script=script, random=drawn)
    return plan(scenario, rng=random.Random(seed), duration_s=duration_s, usable=USABLE)


def test_a_script_is_carried_out_as_it_is_written() -> None:
    planned = made(
        ScriptedFault(name="kill-leader", at_s=5, hold_s=2),
        ScriptedFault(name="freeze-leader", at_s=1, hold_s=3, every_s=20),
    )

    assert [(p.at_s, p.fault) for p in planned] == [
        (1, "freeze-leader"),
        (5, "kill-leader"),
        (21, "freeze-leader"),
        (41, "freeze-leader"),
    ]
    assert [p.number for p in planned] == [1, 2, 3, 4]
    assert all(p.required for p in planned)


def test_scripted_faults_that_do_not_fit_are_skipped_and_an_empty_plan_is_refused() -> None:
    late = ScriptedFault(name="kill-leader", at_s=50, hold_s=20)

    assert [p.at_s for p in made(late, ScriptedFault(name="kill-leader", at_s=0, hold_s=1))] == [0]
    with pytest.raises(ConfigError, match="no fault fits into 60 s"):
        made(late)


def test_a_script_with_an_unavailable_fault_is_refused() -> None:
    with pytest.raises(ConfigError, match="cut-pair is not available here"):
        made(ScriptedFault(name="cut-pair", at_s=0, hold_s=1))


def test_an_unavailable_fault_is_never_drawn() -> None:
    planned = made(drawn=RandomFaults(weights={"cut-pair": 100, "kill-leader": 1, "freeze-leader": 0}))

    assert {p.fault for p in planned} == {"kill-leader"}
    assert not any(p.required for p in planned)


def test_another_seed_is_another_plan() -> None:
    drawn = RandomFaults(weights={"kill-leader": 1, "freeze-leader": 1})

    assert made(drawn=drawn, seed=1) == made(drawn=drawn, seed=1)
    assert made(drawn=drawn, seed=1) != made(drawn=drawn, seed=2)


def test_a_known_seed_has_a_known_plan() -> None:
    """A seed in an old report must still produce the same run."""
    planned = made(drawn=RandomFaults(weights={"kill-leader": 3, "freeze-leader": 1}), seed=7, duration_s=15)

    assert [(p.at_s, p.hold_s, p.fault, p.choice) for p in planned] == KNOWN


KNOWN = [
    (2.3, 4.3, "kill-leader", 958804057),
    (6.6, 2.8, "kill-leader", 2708517688),
    (9.4, 1.2, "kill-leader", 2694805173),
    (12.1, 1.5, "kill-leader", 2503952625),
]


def test_drawn_faults_do_not_overlap_scripted_ones() -> None:
    """A scripted fault must take effect, so no drawn fault may have claimed its target at that time."""
    planned = made(
        ScriptedFault(name="freeze-leader", at_s=20, hold_s=10),
        drawn=RandomFaults(weights={"kill-leader": 1}, gap_s=(0, 1), hold_s=(1, 4)),
    )

    (scripted,) = [p for p in planned if p.required]
    drawn = [p for p in planned if not p.required]
    assert len(drawn) > 10
    assert not [p for p in drawn if p.at_s < scripted.end_s and scripted.at_s < p.end_s]


@given(
    seed=st.integers(min_value=0, max_value=2**32),
    overlap=st.integers(min_value=1, max_value=4),
    least=st.floats(min_value=0, max_value=3),
    more=st.floats(min_value=0.5, max_value=5),
    hold=st.floats(min_value=0, max_value=10),
)
def test_plans_keep_their_limits(seed: int, overlap: int, least: float, more: float, hold: float) -> None:
    drawn = RandomFaults(
        weights=dict.fromkeys(USABLE, 1.0),
        gap_s=(least, least + more),
        hold_s=(hold / 2, hold),
        overlap=overlap,
    )
    try:
        planned = made(drawn=drawn, seed=seed, duration_s=40)
    except ConfigError:
        return  # no fault fits into the duration

    assert all(p.end_s <= 40 for p in planned), "all is healed when the time is over"
    assert list(planned) == sorted(planned, key=lambda p: p.at_s)
    for p in planned:
        in_force = [other for other in planned if other.at_s <= p.at_s < other.end_s]
        assert len(in_force) <= overlap


def test_the_backend_decides_which_faults_are_usable() -> None:
    here, there = set(faults.usable("process")), set(faults.usable("netns"))

    assert here < there
    assert {"isolate-leader", "reject-pair", "cut-replica-from-etcd"} <= there - here
