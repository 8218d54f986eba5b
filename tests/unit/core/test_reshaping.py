"""Growing and shrinking: the ranks save first where they can, and nothing waits where they cannot."""

from __future__ import annotations

import pytest

from strata.core.ids import WorkerId
from strata.core.job_requests import decide_scale
from strata.core.records import Phase, StopAction
from strata.core.reshaping import (
    BEGIN_BARRIER,
    CLOSING_BARRIER,
    GRACE_MS,
    LATE_S,
    SAVED_BARRIER,
)
from strata.core.stopping import DEFAULT_GRACE_MS, StopRequest, decide_stop, next_deadline_s, revisions
from strata.core.stopping import LATE_S as NOTICE_LATE_S
from strata.core.worlds import needs_settling, plan_world
from tests.not_none import not_none
from tests.unit.core.rig import KEYS, Observer, leave, plan, register, released, world_of
from tests.unit.core.test_worlds import Job, ends, head

OVER_S = GRACE_MS / 1000 + LATE_S


def meet(job: Job, barrier: str, generation: int = 1) -> None:
    """Let all ranks meet at a barrier."""
    released(job.store, barrier, generation)


def go(job: Job, *, asked_s: float = 0.0) -> str:
    """Carry out all that the leader plans once the members have settled."""
    while (planned := plan(job.store, job.epoch, settled=True, asked_s=asked_s)).txns:
        for txn in planned.txns:
            assert job.store.execute(txn).succeeded, planned.reason
        assert job.store.problems() == []
    return planned.reason


def growing() -> Job:
    """A world of two whose ranks heed notices, and a third member that has just come."""
    job = Job(2, least=1)
    go(job)
    meet(job, BEGIN_BARRIER)
    register(job.store, "w2", min_workers=1, max_workers=3)
    return job


@pytest.fixture
def job() -> Job:
    return growing()


def test_a_world_grows_once_its_ranks_have_saved(job: Job) -> None:
    assert needs_settling(job.store.live, {})
    assert go(job) == "generation 1 goes on with 2 members, which save first: 1 more members have settled"
    asked = not_none(job.store.live.reshape(1))
    assert (asked.record.reason, asked.record.grace_ms) == ("1 more members have settled", GRACE_MS)
    before = job.store.revision
    go(job, asked_s=OVER_S - 1)
    assert (head(job.store).generation, job.store.revision) == (1, before), (
        "they train on, and nothing is written"
    )
    meet(job, SAVED_BARRIER)
    go(job)
    assert (head(job.store).generation, head(job.store).reason) == (2, "1 more members have settled")
    assert len(world_of(job.store)) == 3
    assert job.store.live.reshape(2) is None


def test_a_world_shrinks_once_its_ranks_have_saved() -> None:
    job = Job(3, least=1)
    go(job)
    meet(job, BEGIN_BARRIER)
    job.store.settle(lambda view: decide_scale(view, max_workers=2))
    go(job)
    assert head(job.store).generation == 1
    meet(job, SAVED_BARRIER)
    go(job)
    assert (head(job.store).generation, len(world_of(job.store))) == (2, 2)


def test_ranks_that_heed_nothing_are_not_waited_for() -> None:
    job = Job(2, least=1)
    go(job)
    register(job.store, "w2", min_workers=1, max_workers=3)
    go(job)
    assert (head(job.store).generation, len(world_of(job.store))) == (2, 3)
    assert job.store.live.reshape(1) is None


def test_ranks_that_are_ready_just_before_the_next_world_save_first_after_all() -> None:
    job = Job(2, least=1)
    go(job)
    register(job.store, "w2", min_workers=1, max_workers=3)
    late = plan(job.store, job.epoch, settled=True)
    meet(job, BEGIN_BARRIER)
    results = [job.store.execute(txn).succeeded for txn in late.txns]
    assert not results[-1], "the head"
    go(job)
    assert head(job.store).generation == 1
    assert job.store.live.reshape(1) is not None


def test_what_an_earlier_generation_met_for_says_nothing_of_this_one(job: Job) -> None:
    meet(job, SAVED_BARRIER)
    go(job)
    assert (head(job.store).generation, len(world_of(job.store))) == (2, 3)
    leave(job.store, "w2")
    go(job)
    register(job.store, "w3", min_workers=1, max_workers=3)
    go(job)
    assert head(job.store).generation == 4, "generation 3 has not begun: its ranks hear nothing yet"


def test_ranks_that_take_too_long_are_waited_for_no_more(job: Job) -> None:
    go(job)
    assert next_deadline_s(job.store.live, dict.fromkeys(revisions(job.store.live), 10.0)) == OVER_S - 10
    go(job, asked_s=OVER_S)
    assert (head(job.store).generation, len(world_of(job.store))) == (2, 3)
    assert head(job.store).reason == "1 more members have settled; the ranks had not saved in time"


def test_ranks_that_saved_get_another_world_though_the_newcomer_has_gone(job: Job) -> None:
    go(job)
    leave(job.store, "w2")
    go(job)
    assert head(job.store).generation == 1
    meet(job, SAVED_BARRIER)
    go(job)
    assert (head(job.store).generation, len(world_of(job.store))) == (2, 2)


def test_a_death_meanwhile_ends_the_generation_at_once(job: Job) -> None:
    go(job)
    leave(job.store, "w1")
    go(job)
    assert (head(job.store).generation, head(job.store).reason) == (2, "w1 is gone")


def test_a_training_that_ends_meanwhile_is_done(job: Job) -> None:
    go(job)
    ends(job.store, 0, 0)
    go(job)
    assert head(job.store).generation == 1
    ends(job.store, 1, 0)
    go(job)
    assert job.store.live.phase() is Phase.DONE


@pytest.mark.parametrize("how", ["a rank is done", "a rank is about to be"])
@pytest.mark.parametrize("when", ["before it is asked for", "late"])
def test_a_training_that_is_about_to_end_is_neither_ended_nor_begun_again(
    job: Job, how: str, when: str
) -> None:
    """It had fewer steps left than the one that was agreed on, and a rank evaluates for long."""
    if when == "late":
        go(job)
    if how == "a rank is done":
        ends(job.store, 0, 0)
    else:
        meet(job, CLOSING_BARRIER)
    go(job, asked_s=OVER_S)
    assert head(job.store).generation == 1
    assert (job.store.live.reshape(1) is not None) == (when == "late")
    for rank in (0, 1):
        ends(job.store, rank, 0)
    go(job, asked_s=OVER_S)
    assert job.store.live.phase() is Phase.DONE


@pytest.mark.parametrize("heeds", [True, False])
def test_a_world_of_fewer_than_the_least_members_follows_no_growth(heeds: bool) -> None:
    """The least number was raised: two train on until there are as many, rather than stop for three."""
    job = Job(2, least=1)
    go(job)
    if heeds:
        meet(job, BEGIN_BARRIER)
    job.store.settle(lambda view: decide_scale(view, min_workers=4, max_workers=5))
    register(job.store, "w2", min_workers=1, max_workers=3)
    go(job)
    assert head(job.store).generation == 1
    assert job.store.live.reshape(1) is None
    register(job.store, "w3", min_workers=1, max_workers=3)
    go(job)
    assert (job.store.live.reshape(1) is not None) == heeds
    assert len(world_of(job.store)) == (2 if heeds else 4)


@pytest.mark.parametrize("late", [True, False])
def test_ranks_that_saved_wait_for_the_least_number_of_members(job: Job, late: bool) -> None:
    go(job)
    leave(job.store, "w2")
    job.store.settle(lambda view: decide_scale(view, min_workers=3, max_workers=3))
    if not late:
        meet(job, SAVED_BARRIER)
    go(job, asked_s=OVER_S if late else 0.0)
    if late:
        assert head(job.store).generation == 1, "they have not saved, and train on"
    else:
        assert head(job.store).forming
        assert "2 of at least 3 members are left" in head(job.store).reason


@pytest.mark.parametrize("saved", [False, True])
def test_a_notice_counts_more_and_has_its_own_time(job: Job, saved: bool) -> None:
    """The newcomer is meant by a preemption as well, whenever the leader asked for the save."""
    go(job)
    request = StopRequest(action=StopAction.PREEMPT, reason="maintenance")
    job.store.settle(lambda view: decide_stop(view, request))
    if saved:
        meet(job, SAVED_BARRIER)
    go(job, asked_s=DEFAULT_GRACE_MS / 1000)
    assert head(job.store).generation == 1, "its ranks are stopping"
    ends(job.store, 0, 75)
    ends(job.store, 1, 75)
    go(job)
    assert head(job.store).forming
    assert [one.notice.reason for one in head(job.store).asked] == ["maintenance"]
    late = growing()
    go(late)
    late.store.settle(lambda view: decide_stop(view, request))
    go(late, asked_s=DEFAULT_GRACE_MS / 1000 + NOTICE_LATE_S)
    assert "2 of 2 ranks had not stopped in time" in head(late.store).reason


def test_a_drain_meanwhile_names_members_of_this_world_only(job: Job) -> None:
    go(job)
    request = StopRequest(action=StopAction.DRAIN, reason="its fan", workers=(WorkerId("w1"),))
    job.store.settle(lambda view: decide_stop(view, request))
    ends(job.store, 1, 75)
    go(job)
    assert world_of(job.store).keys() == {"w0", "w2"}


def test_a_head_that_was_planned_before_the_ranks_were_asked_comes_to_nothing() -> None:
    """One leader's view shows that nobody heeds notices, the next one's that all do: it asked them."""
    job = Job(2, least=1)
    go(job)
    register(job.store, "w2", min_workers=1, max_workers=3)
    old = Observer(job.store)
    early = plan_world(old.job, keys=KEYS, epoch=job.epoch, settled=True, asked_s={}, now_unix_ms=0).txns[-1]
    meet(job, BEGIN_BARRIER)
    go(job)
    assert job.store.live.reshape(1) is not None
    assert not job.store.execute(early).succeeded


def test_a_head_that_was_planned_before_the_ranks_came_to_their_end_comes_to_nothing(job: Job) -> None:
    go(job)
    late = plan(job.store, job.epoch, settled=True, asked_s=OVER_S)
    meet(job, CLOSING_BARRIER)
    assert not [job.store.execute(txn).succeeded for txn in late.txns][-1]
    go(job, asked_s=OVER_S)
    assert head(job.store).generation == 1


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_head_that_was_planned_before_a_rank_was_done_comes_to_nothing(ranks: tuple[int, ...]) -> None:
    """In a job whose ranks do not heed notices: it would train again though all of them are done."""
    job = Job(2, least=1)
    go(job)
    register(job.store, "w2", min_workers=1, max_workers=3)
    larger = plan(job.store, job.epoch, settled=True)
    for rank in ranks:
        ends(job.store, rank, 0)
    assert not [job.store.execute(txn).succeeded for txn in larger.txns][-1]
    go(job)
    assert head(job.store).generation == 1
    assert (job.store.live.phase() is Phase.DONE) == (len(ranks) == 2)
