"""The judgement of worlds of another size: takes one that followed a save, and rejects each doctored one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.reshaping import BEGIN_BARRIER, SAVED_BARRIER, TIME_S, Reshapings

from strata.core.job_requests import decide_scale
from strata.core.records import CheckpointState
from tests.unit.core.checkpoint_job import Job
from tests.unit.core.rig import JOB, carry_out, leave, register, released

STEP = 20
OVER_S = 1000.0


class Grown:
    """A job of two members that saved `STEP`, were asked to save first, and to which a third has come."""

    def __init__(self) -> None:
        self.job = Job(a=1, b=1)
        self.reshapings = Reshapings()
        assert self.judged() is None
        released(self.job.store, BEGIN_BARRIER)
        self.job.store.settle(lambda view: decide_scale(view, max_workers=3))
        register(self.job.store, "c", slots=1)
        carry_out(self.job.store, self.job.epoch, settled=True)
        self.reshapings.asked(1, 0.0)
        self.job.save(STEP)
        assert self.reshapings.has_saved(1, STEP) is None

    def goes_on(self, *, asked_s: float = 0.0) -> None:
        carry_out(self.job.store, self.job.epoch, settled=True, asked_s=asked_s)
        head = self.job.store.live.head()
        assert head is not None
        assert head.record.generation == 2

    def judged(self, *, now_s: float = 1.0) -> str | None:
        return self.reshapings.head(self.job.store.live, now_s)


def test_a_world_that_follows_the_save_is_right() -> None:
    grown = Grown()
    released(grown.job.store, SAVED_BARRIER)
    grown.goes_on()
    assert grown.judged() is None


def test_one_that_does_not_wait_for_the_save_is_wrong_until_the_time_is_over() -> None:
    for now_s, wrong in ((TIME_S - 1, "before its ranks had saved"), (TIME_S, None)):
        grown = Grown()
        grown.goes_on(asked_s=OVER_S)
        said = grown.judged(now_s=now_s)
        assert (said is None) if wrong is None else (said is not None and wrong in said)


@pytest.mark.parametrize("state", [CheckpointState.OPEN, CheckpointState.CORRUPT])
def test_one_whose_save_is_not_committed_is_wrong(state: CheckpointState) -> None:
    grown = Grown()
    released(grown.job.store, SAVED_BARRIER)
    grown.goes_on()
    entry = grown.job.store.live.checkpoint(STEP, 1)
    assert entry is not None
    grown.job.store.put(entry.key, replace(entry.record, state=state))
    assert f"is {state.value}" in str(grown.judged())


def test_one_that_begins_elsewhere_is_wrong() -> None:
    grown = Grown()
    released(grown.job.store, SAVED_BARRIER)
    grown.goes_on()
    head = grown.job.store.live.head()
    assert head is not None
    assert head.record.restore is not None
    grown.job.store.put(JOB.head, replace(head.record, restore=replace(head.record.restore, step=STEP - 8)))
    assert "begins from step 12" in str(grown.judged())


def test_ranks_that_save_different_steps_are_wrong() -> None:
    assert "saved step 20 and step 21" in str(Grown().reshapings.has_saved(1, STEP + 1))


def test_a_death_needs_no_save() -> None:
    grown = Grown()
    leave(grown.job.store, "b")
    grown.goes_on()
    assert grown.judged() is None
