"""When the next save is due: the same step on every rank, and an interval that is worth the save's cost."""

from __future__ import annotations

import math

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import Refused
from strata.training.history import past_of
from strata.training.rank_context import Alone
from strata.training.save.cadence import (
    FIRST_STEPS,
    GROWTH,
    MAX_INTERVAL_S,
    PRIOR_S,
    Pace,
    Rule,
    agreed,
    next_save,
    pace_of,
    payload_of,
    time_between_failures,
)
from strata.v1.worlds_pb2 import Generation, ListGenerationsResponse, World

COSTS = Rule()


@pytest.mark.parametrize(("step", "due"), [(0, 20), (1, 20), (19, 20), (20, 40), (33, 40)])
def test_every_n_steps_means_multiples_of_n(step: int, due: int) -> None:
    assert next_save(Rule(every_steps=20), step=step, before=0, pace=None).step == due


def test_seconds_become_steps_by_the_slowest_rank() -> None:
    pace = agreed({0: payload_of(Pace(step_s=0.1)), 1: payload_of(Pace(step_s=0.5, save_s=2))})
    assert (pace.step_s, pace.save_s) == (0.5, 2)
    plan = next_save(Rule(every_s=60), step=7, before=100, pace=pace)
    assert (plan.step, plan.interval, plan.reason) == (127, 120, "every 60 s")


def test_unmeasured_costs_are_measured_first() -> None:
    for rule in (COSTS, Rule(every_s=60)):
        assert next_save(rule, step=5, before=0, pace=None).step == 5 + FIRST_STEPS
        assert next_save(rule, step=5, before=0, pace=Pace()).step == 5 + FIRST_STEPS


def test_young_and_daly() -> None:
    pace = Pace(step_s=1.0, save_s=2.0, failure_s=7200.0)
    plan = next_save(COSTS, step=0, before=10**6, pace=pace)
    assert plan.interval == pytest.approx(math.sqrt(2 * 2.0 * 7200.0), rel=0.05)
    assert plan.reason == "a save costs 2 s, and the job fails every 2 h"


def best_interval_s(cost: float, between: float) -> float:
    """Return the interval with the least lost time in Daly's model, by search."""

    def loss(interval: float) -> float:
        return between / interval * math.expm1((interval + cost) / between)

    return min((i * 0.5 for i in range(1, 20_000)), key=loss)


@pytest.mark.parametrize(("cost", "between"), [(1, 600), (10, 3600), (30, 1800), (0.2, 100)])
def test_the_planned_interval_minimizes_the_lost_time(cost: float, between: float) -> None:
    pace = Pace(step_s=0.01, save_s=cost, failure_s=between)
    plan = next_save(COSTS, step=0, before=10**9, pace=pace)
    assert plan.interval * 0.01 == pytest.approx(best_interval_s(cost, between), rel=0.03, abs=1)


@given(
    step_s=st.floats(1e-4, 1e4),
    save_s=st.floats(0, 1e4),
    commit_s=st.floats(0, 1e4),
    failure_s=st.floats(1, 1e8),
    before=st.integers(1, 10**6),
    every_s=st.sampled_from([0.0, 1.0, 600.0]),
)
def test_a_plan_lies_ahead_and_grows_slowly(
    step_s: float, save_s: float, commit_s: float, failure_s: float, before: int, every_s: float
) -> None:
    pace = Pace(step_s=step_s, save_s=save_s, commit_s=commit_s, failure_s=failure_s)
    plan = next_save(Rule(every_s=every_s), step=100, before=before, pace=pace)
    assert 100 < plan.step <= 100 + GROWTH * before
    assert plan.interval * step_s <= max(MAX_INTERVAL_S, every_s) + step_s


def test_saves_are_not_closer_than_a_commit_takes() -> None:
    pace = Pace(step_s=1.0, save_s=0.01, commit_s=90.0, failure_s=60.0)
    assert next_save(COSTS, step=0, before=1000, pace=pace).interval == 90


def test_more_failures_shorten_the_estimated_time_between_failures() -> None:
    assert time_between_failures(failures=0, began_s=5.0, now_s=5.0) == PRIOR_S
    assert time_between_failures(failures=0, began_s=100.0, now_s=100.0 + PRIOR_S) == 2 * PRIOR_S
    assert time_between_failures(failures=9, began_s=100.0, now_s=110.0) < PRIOR_S / 9


def test_only_generations_begun_by_a_failure_count_as_failures() -> None:
    began = [
        Generation(world=World(generation=n, forming=forming), began_unix_ms=1000 * n, failure=failure)
        for n, forming, failure in ((1, False, False), (2, True, True), (3, False, False), (4, False, False))
    ]

    class LiveReports(Alone):
        generation = 3

        def call(self, request: Message, *, timeout_s: float = 0.0) -> ListGenerationsResponse:
            return ListGenerationsResponse(generations=began)

    past = past_of(LiveReports(world_size=1), now_unix_s=11.0)
    assert (past.began_unix_s, past.failure_s) == (3.0, (10.0 + PRIOR_S) / 2)


def test_all_ranks_agree_on_a_pace_in_any_order() -> None:
    payloads = {r: payload_of(Pace(step_s=r + 1.0, failure_s=10.0 * (r + 1)), more="x") for r in range(3)}
    assert agreed(payloads) == agreed(dict(reversed(payloads.items()))) == Pace(step_s=3.0, failure_s=10.0)
    assert agreed({}) == Pace()
    with pytest.raises(Refused, match="rank 1 sent no pace"):
        agreed({0: payload_of(Pace()), 1: b"{}"})


def test_a_missing_or_invalid_pace_is_ignored() -> None:
    assert pace_of({}) is None
    assert pace_of({"step_s": "x", "save_s": 1, "commit_s": 1, "failure_s": 1}) is None
    assert pace_of({"step_s": 1, "save_s": 1, "commit_s": 1, "failure_s": 1}) is not None


def test_a_rank_payload_fits_the_barrier_of_a_large_world() -> None:
    pace = Pace(step_s=0.123456789, save_s=12.3456789e-5, commit_s=1234.56789, failure_s=123456.789)
    assert len(payload_of(pace)) <= 512 * 1024 // 4096
