"""The rules for planned stops: they accept a world after the common save, and reject each doctored history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.job_requests import decide_scale
from strata.core.kv.records import CheckpointState
from strata.core.stop.last_step import BEGIN_BARRIER, Decision, Verdict
from strata.core.stop.requests import SCALE_MS
from tests.sim.judges.stops import AGREE_S, Stops
from tests.unit.core.checkpoint_job import Job
from tests.unit.core.rig import JOB, agreed, carry_out, leave, register, released

STEP = 20
SAVED = Decision(STEP, Verdict.SAVE)


class Grown:
    """A job of two members that got a request to stop at `STEP`, because a third member joined, and saved that step."""

    def __init__(self) -> None:
        self.job = Job(a=1, b=1)
        self.stops = Stops()
        assert self.judged() is None
        released(self.job.store, BEGIN_BARRIER)
        self.job.store.settle(lambda view: decide_scale(view, max_workers=3))
        register(self.job.store, "c", slots=1)
        carry_out(self.job.store, self.job.epoch, settled=True)
        self.stops.stop_requested(1, 0.0)

    def saves(self) -> None:
        """Make the ranks agree, and save."""
        assert self.stops.begins(1, STEP) is None
        agreed(self.job.store, STEP)
        assert self.stops.decided(1, SAVED) is None
        self.job.save(STEP)

    def goes_on(self, *, request_ages_s: float = 0.0) -> None:
        carry_out(self.job.store, self.job.epoch, settled=True, request_ages_s=request_ages_s)
        head = self.job.store.live.head()
        assert head is not None
        assert head.record.generation == 2

    def judged(self, *, now_s: float = 1.0) -> str | None:
        return self.stops.head(self.job.store.live, now_s)


def test_a_world_after_the_common_save_is_accepted() -> None:
    grown = Grown()
    grown.saves()
    grown.goes_on()
    assert grown.judged() is None


def test_a_world_formed_before_the_save_is_rejected_until_the_time_limit() -> None:
    for now_s, wrong in ((AGREE_S - 1, "before its ranks had agreed on a step"), (AGREE_S, None)):
        grown = Grown()
        grown.goes_on(request_ages_s=SCALE_MS / 1000)
        problem = grown.judged(now_s=now_s)
        assert (problem is None) if wrong is None else (problem is not None and wrong in problem)


@pytest.mark.parametrize("state", [CheckpointState.OPEN, CheckpointState.CORRUPT])
def test_a_world_after_an_uncommitted_save_is_rejected(state: CheckpointState) -> None:
    grown = Grown()
    grown.saves()
    grown.goes_on()
    entry = grown.job.store.live.checkpoint(STEP, 1)
    assert entry is not None
    grown.job.store.put(entry.key, replace(entry.record, state=state))
    assert f"is {state.value}" in str(grown.judged())


def test_a_world_that_restores_another_step_is_rejected() -> None:
    grown = Grown()
    grown.saves()
    grown.goes_on()
    head = grown.job.store.live.head()
    assert head is not None
    assert head.record.restore is not None
    grown.job.store.put(JOB.head, replace(head.record, restore=replace(head.record.restore, step=STEP - 8)))
    assert "begins from step 12" in str(grown.judged())


def test_ranks_that_receive_different_steps_are_rejected() -> None:
    stops = Stops()
    assert stops.decided(1, SAVED) is None
    assert "got both" in str(stops.decided(1, Decision(STEP + 1, Verdict.SAVE)))


@pytest.mark.parametrize("first", ["the step", "the decision"])
def test_a_rank_that_begins_a_step_after_the_common_one_is_rejected(first: str) -> None:
    stops = Stops()
    if first == "the step":
        assert stops.begins(1, STEP + 1) is None
        problem = stops.decided(1, SAVED)
    else:
        assert stops.decided(1, SAVED) is None
        assert stops.begins(1, STEP) is None
        problem = stops.begins(1, STEP + 1)
    assert f"began step {STEP + 1}, and others stop at {STEP}" in str(problem)


def test_a_world_after_a_member_death_needs_no_save() -> None:
    grown = Grown()
    leave(grown.job.store, "b")
    grown.goes_on()
    assert grown.judged() is None
