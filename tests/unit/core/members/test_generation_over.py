"""The end of a generation with a notice: growth, shrinking, every other notice; and newcomers on trial."""

from __future__ import annotations

import dataclasses

import pytest

from strata.core.ids import WorkerId
from strata.core.job_requests import decide_scale
from strata.core.kv.records import CheckpointState, Newcomer, Phase, StopAction
from strata.core.members.membership import decide_rank_exit
from strata.core.members.newcomers import FIRST_S, MOST_S, delay_s
from strata.core.stop.last_step import BEGIN_BARRIER, CLOSING_BARRIER, STOP_BARRIER, Verdict
from strata.core.stop.requests import (
    DEFAULT_GRACE_MS,
    LATE_S,
    SAVE_S,
    SCALE_MS,
    StopRequest,
    common_step,
    decide_stop,
    next_deadline_s,
    revisions,
)
from strata.core.worlds.planning import needs_settling, plan_world
from strata.errors import InvalidArgument
from tests.not_none import not_none
from tests.unit.core.rig import KEYS, Observer, agreed, leave, plan, register, released, world_of
from tests.unit.core.stop_job import DRAIN, GRACE_S, PAUSE, PREEMPT
from tests.unit.core.stop_job import Job as StopJob
from tests.unit.core.worlds.test_planning import Job, checkpoint, commit, ends, head

OVER_S = SCALE_MS / 1000
STEP = 20


def saved(job: Job) -> None:
    """Make the ranks agree on a step, and save it."""
    agreed(job.store, STEP)
    commit(job.store, STEP)


def scaled(job: Job, generation: int) -> bool:
    notice = job.store.live.notice(generation)
    return notice is not None and notice.record.action is StopAction.SCALE


def meet(job: Job, barrier: str, generation: int = 1) -> None:
    """Release a barrier at which all ranks have met."""
    released(job.store, barrier, generation)


def go(job: Job, *, request_ages_s: float = 0.0) -> str:
    """Execute all plans of the leader once the members have settled."""
    while (planned := plan(job.store, job.epoch, settled=True, request_ages_s=request_ages_s)).txns:
        for txn in planned.txns:
            assert job.store.execute(txn).succeeded, planned.reason
        assert job.store.problems() == []
    return planned.reason


def growing() -> Job:
    """Return a world of two whose ranks support graceful stop, and a third member that has just registered."""
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
    assert (
        go(job)
        == "generation 1 goes on with 2 members, which have a stop request: 1 more members have settled"
    )
    notice = not_none(job.store.live.notice(1)).record
    assert (notice.action, notice.reason, notice.grace_ms) == (
        StopAction.SCALE,
        "1 more members have settled",
        SCALE_MS,
    )
    before = job.store.revision
    go(job, request_ages_s=OVER_S - 1)
    assert (head(job.store).generation, job.store.revision) == (1, before), (
        "they train on, and nothing is written"
    )
    saved(job)
    go(job)
    assert (head(job.store).generation, head(job.store).reason) == (
        2,
        "1 more members have settled; step 20 is saved",
    )
    assert len(world_of(job.store)) == 3
    assert not_none(head(job.store).restore).step == STEP
    assert job.store.live.notice(2) is None


def test_a_world_shrinks_once_its_ranks_have_saved() -> None:
    job = Job(3, least=1)
    go(job)
    meet(job, BEGIN_BARRIER)
    job.store.settle(lambda view: decide_scale(view, max_workers=2))
    go(job)
    assert head(job.store).generation == 1
    saved(job)
    go(job)
    assert (head(job.store).generation, len(world_of(job.store))) == (2, 2)


def test_ranks_without_graceful_stop_are_not_waited_for() -> None:
    job = Job(2, least=1)
    go(job)
    register(job.store, "w2", min_workers=1, max_workers=3)
    go(job)
    assert (head(job.store).generation, len(world_of(job.store))) == (2, 3)
    assert not scaled(job, 1)


def test_ranks_that_begin_just_before_the_next_world_save_first() -> None:
    job = Job(2, least=1)
    go(job)
    register(job.store, "w2", min_workers=1, max_workers=3)
    late = plan(job.store, job.epoch, settled=True)
    meet(job, BEGIN_BARRIER)
    results = [job.store.execute(txn).succeeded for txn in late.txns]
    assert not results[-1], "the head"
    go(job)
    assert head(job.store).generation == 1
    assert scaled(job, 1)


def test_a_barrier_of_an_earlier_generation_does_not_count_for_this_one(job: Job) -> None:
    saved(job)
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
    go(job, request_ages_s=OVER_S)
    assert (head(job.store).generation, len(world_of(job.store))) == (2, 3)
    assert head(job.store).reason == "1 more members have settled; the ranks had not stopped in time"


def test_ranks_that_saved_get_a_new_world_even_if_the_newcomer_left(job: Job) -> None:
    go(job)
    leave(job.store, "w2")
    go(job)
    assert head(job.store).generation == 1
    saved(job)
    go(job)
    assert (head(job.store).generation, len(world_of(job.store))) == (2, 2)


def test_a_member_death_before_a_resize_ends_the_generation_at_once(job: Job) -> None:
    go(job)
    leave(job.store, "w1")
    go(job)
    assert (head(job.store).generation, head(job.store).reason) == (2, "w1 is gone")


def test_a_training_that_finishes_before_a_resize_is_done(job: Job) -> None:
    go(job)
    ends(job.store, 0, 0)
    go(job)
    assert head(job.store).generation == 1
    ends(job.store, 1, 0)
    go(job)
    assert job.store.live.phase() is Phase.DONE


@pytest.mark.parametrize("how", ["a rank is done", "a rank is about to be"])
@pytest.mark.parametrize("when", ["before it is asked for", "late"])
def test_a_training_about_to_finish_is_not_restarted_for_a_newcomer(job: Job, how: str, when: str) -> None:
    """The training ends before the agreed step, and one rank is still evaluating."""
    if when == "late":
        go(job)
    if how == "a rank is done":
        ends(job.store, 0, 0)
    else:
        meet(job, CLOSING_BARRIER)
    go(job, request_ages_s=OVER_S)
    assert head(job.store).generation == 1
    assert scaled(job, 1) == (when == "late")
    for rank in (0, 1):
        ends(job.store, rank, 0)
    go(job, request_ages_s=OVER_S)
    assert job.store.live.phase() is Phase.DONE


@pytest.mark.parametrize("supports_graceful_stop", [True, False])
def test_a_world_below_the_minimum_does_not_grow_until_enough_members_join(
    supports_graceful_stop: bool,
) -> None:
    """The minimum is raised to 4: the two members train on until there are 4 members, and do not stop for three."""
    job = Job(2, least=1)
    go(job)
    if supports_graceful_stop:
        meet(job, BEGIN_BARRIER)
    job.store.settle(lambda view: decide_scale(view, min_workers=4, max_workers=5))
    register(job.store, "w2", min_workers=1, max_workers=3)
    go(job)
    assert head(job.store).generation == 1
    assert not scaled(job, 1)
    register(job.store, "w3", min_workers=1, max_workers=3)
    go(job)
    assert scaled(job, 1) == supports_graceful_stop
    assert len(world_of(job.store)) == (2 if supports_graceful_stop else 4)


def test_a_rank_that_exits_early_during_a_resize_counts_as_failed(job: Job) -> None:
    """If the exit counted as a stop, nothing would end a generation that is about to finish."""
    go(job)
    meet(job, CLOSING_BARRIER)
    ends(job.store, 0, 75)
    ends(job.store, 1, 0)
    go(job)
    assert (head(job.store).generation, "rank 0 of w0 failed" in head(job.store).reason) == (2, True)


def test_a_rank_exit_decided_before_a_newer_notice_fails(job: Job) -> None:
    go(job)
    member = not_none(job.store.live.world()).member_of(0)
    failed = decide_rank_exit(job.store.live, member.worker, member.incarnation, 1, 0, 75)
    job.store.settle(lambda view: decide_stop(view, StopRequest(action=PREEMPT)))
    assert not job.store.execute(not_none(failed.txn)).succeeded


@pytest.mark.parametrize("late", [True, False])
def test_ranks_that_saved_wait_for_the_least_number_of_members(job: Job, late: bool) -> None:
    go(job)
    leave(job.store, "w2")
    job.store.settle(lambda view: decide_scale(view, min_workers=3, max_workers=3))
    if not late:
        saved(job)
    go(job, request_ages_s=OVER_S if late else 0.0)
    assert head(job.store).forming
    assert "2 of at least 3 members are left" in head(job.store).reason


@pytest.mark.parametrize("when", ["before a step was agreed on", "after it was"])
def test_a_preemption_that_replaces_a_scale_notice_keeps_its_step(job: Job, when: str) -> None:
    """The preemption includes the newcomer."""
    go(job)
    if when == "after it was":
        agreed(job.store, STEP)
    request = StopRequest(action=PREEMPT, reason="maintenance")
    job.store.settle(lambda view: decide_stop(view, request))
    notice = not_none(job.store.live.notice(1)).record
    assert (notice.action, notice.grace_ms) == (PREEMPT, DEFAULT_GRACE_MS), "the time to agree is no grace"
    go(job, request_ages_s=OVER_S)
    assert head(job.store).generation == 1, "its ranks are stopping"
    if when == "after it was":
        commit(job.store, STEP)
    else:
        ends(job.store, 0, 75)
        ends(job.store, 1, 75)
    go(job)
    assert head(job.store).forming
    assert [one.notice.reason for one in head(job.store).leave_requests] == ["maintenance"]
    go(job)
    assert head(job.store).generation == 2, "nobody of them gets a place"


def test_a_drain_during_a_resize_removes_only_the_named_member(job: Job) -> None:
    go(job)
    request = StopRequest(action=StopAction.DRAIN, reason="its fan", workers=(WorkerId("w1"),))
    job.store.settle(lambda view: decide_stop(view, request))
    ends(job.store, 1, 75)
    go(job)
    assert world_of(job.store).keys() == {"w0", "w2"}


def test_a_head_planned_before_a_scale_notice_is_not_written() -> None:
    """In the old leader's view no rank supports graceful stop; in the next leader's all do, so it writes a notice."""
    job = Job(2, least=1)
    go(job)
    register(job.store, "w2", min_workers=1, max_workers=3)
    old = Observer(job.store)
    early = plan_world(
        old.job, keys=KEYS, epoch=job.epoch, settled=True, request_ages_s={}, now_unix_ms=0
    ).txns[-1]
    meet(job, BEGIN_BARRIER)
    go(job)
    assert scaled(job, 1)
    assert not job.store.execute(early).succeeded


def test_a_head_planned_before_the_closing_barrier_is_not_written(job: Job) -> None:
    go(job)
    late = plan(job.store, job.epoch, settled=True, request_ages_s=OVER_S)
    meet(job, CLOSING_BARRIER)
    assert not [job.store.execute(txn).succeeded for txn in late.txns][-1]
    go(job, request_ages_s=OVER_S)
    assert head(job.store).generation == 1


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_head_planned_before_a_rank_finished_is_not_written(ranks: tuple[int, ...]) -> None:
    """The ranks do not support graceful stop: with such a head they would train again after all of them are done."""
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


# -- every notice -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "state", "why"),
    [
        (Verdict.SAVE, CheckpointState.COMMITTED, "step 20 is saved"),
        (Verdict.SAVE, CheckpointState.ABORTED, "step 20 could not be saved"),
        (Verdict.NO_TIME, None, "without a save: no time is left to save"),
        (Verdict.NOTHING_NEW, None, "without a save: nothing was trained since the last checkpoint"),
        (Verdict.SAVE, CheckpointState.OPEN, ""),
        (Verdict.SAVE, None, ""),
    ],
)
@pytest.mark.parametrize("action", [PREEMPT, DRAIN, PAUSE])
def test_a_generation_ends_once_its_common_step_is_saved_or_will_not_be(
    action: StopAction, verdict: Verdict, state: CheckpointState | None, why: str
) -> None:
    job = StopJob()
    job.stop(action, *(["w1"] if action is DRAIN else []))
    job.agree(STEP, verdict)
    if state is CheckpointState.COMMITTED:
        commit(job.store, STEP)
    elif state is not None:
        checkpoint(job.store, STEP, generation=1, state=state)
    reason = job.go(settled=True)
    assert job.head.generation == (2 if why else 1)
    assert why in reason
    if why:
        expected = {"w0", "w2"} if action is DRAIN else set()
        assert set(world_of(job.store)) == expected
        assert (job.store.live.phase() is Phase.PAUSED) == (action is PAUSE)


def test_an_open_earlier_save_is_awaited_although_the_common_step_is_not_saved() -> None:
    job = StopJob()
    job.stop(PREEMPT)
    checkpoint(job.store, STEP - 5, generation=1, state=CheckpointState.OPEN)
    job.agree(STEP, Verdict.TOO_SLOW)
    job.go(settled=True, request_ages_s=GRACE_S)
    assert job.head.generation == 1
    over = plan(job.store, job.epoch, settled=True, request_ages_s=GRACE_S + LATE_S)
    assert "without a save" in over.reason, "but not without end"
    commit(job.store, STEP - 5)
    assert "without a save: a save takes longer" in job.go(settled=True)


def test_a_save_that_takes_longer_than_the_time_to_agree_is_waited_for(job: Job) -> None:
    go(job)
    agreed(job.store, STEP)
    checkpoint(job.store, STEP, generation=1, state=CheckpointState.OPEN)
    go(job, request_ages_s=OVER_S + 300)
    assert head(job.store).generation == 1
    known = dict.fromkeys(revisions(job.store.live), 0.0)
    assert next_deadline_s(job.store.live, known) == SAVE_S
    commit(job.store, STEP)
    go(job)
    assert not_none(head(job.store).restore).step == STEP


def test_a_step_that_is_never_saved_is_not_waited_for_without_end(job: Job) -> None:
    go(job)
    agreed(job.store, STEP)
    go(job, request_ages_s=SAVE_S)
    assert "step 20 was not saved in time" in head(job.store).reason


@pytest.mark.parametrize("action", [PREEMPT, PAUSE])
def test_a_stop_before_the_ranks_begin_does_not_wait_for_a_common_step(action: StopAction) -> None:
    job = StopJob()
    job.leaves("w2")
    job.go(settled=True)
    job.stop(action)
    assert "its ranks had not begun" in job.go()
    assert (job.head.generation, job.head.forming) == (3, True)


def test_a_stop_at_once_waits_for_no_step(job: Job) -> None:
    stopped = StopJob()
    stopped.stop(PREEMPT, now=True)
    assert "at once" in stopped.go()
    assert stopped.head.forming


@pytest.mark.parametrize("past", [(), (1,)])
def test_only_an_outcome_that_all_confirmed_decides(past: tuple[int, ...]) -> None:
    job = StopJob()
    assert common_step(job.store.live, 1, ranks=6) is None
    released(job.store, STOP_BARRIER, 1, brought={0: b"[2]"})
    assert common_step(job.store.live, 1, ranks=6) is None
    agreed(job.store, STEP, past=past)
    decision = common_step(job.store.live, 1, ranks=6)
    assert (decision is None) == bool(past)


def test_only_the_leader_may_issue_a_scale_notice() -> None:
    with pytest.raises(InvalidArgument, match="ScaleJob"):
        StopJob().stop(StopAction.SCALE)


def test_a_death_after_the_first_rank_stopped_is_no_failure() -> None:
    job = StopJob(max_no_progress_generations=1)
    job.stop(DRAIN, "w1")
    job.ends(2)
    job.leaves("w0")
    job.go()
    assert (job.head.generation, job.head.failures) == (2, 0)


# -- newcomers --------------------------------------------------------------------------------


def crash(job: StopJob, *, request_ages_s: float = 0.0) -> None:
    """Let the world grow by w3, and w3's first rank fail."""
    job.go(settled=True, request_ages_s=request_ages_s)
    job.agree(STEP, Verdict.NO_TIME)
    job.go(settled=True, request_ages_s=request_ages_s)
    job.begun()
    job.ends(not_none(not_none(job.store.live.world()).holder("w3")).first_rank, code=1)
    job.go(settled=True)
    job.begun()


def crashing() -> StopJob:
    """Return a job of three of at most four members; a fourth joins, and crashes as soon as it has a place."""
    job = StopJob(3, most=4)
    job.join("w3")
    crash(job)
    return job


def test_a_newcomer_that_crashes_again_and_again_is_taken_in_with_growing_delays() -> None:
    job = crashing()
    for crashes, delay in ((1, FIRST_S), (2, 2 * FIRST_S), (3, 4 * FIRST_S)):
        assert set(world_of(job.store)) == {"w0", "w1", "w2"}
        (newcomer,) = job.head.newcomers
        assert (newcomer.worker, newcomer.crashes, delay_s(newcomer)) == ("w3", crashes, delay)
        commit(job.store, STEP * crashes)
        known = dict.fromkeys(revisions(job.store.live), delay - 1)
        assert next_deadline_s(job.store.live, known) == 1
        assert not needs_settling(job.store.live, known)
        job.go(settled=True, request_ages_s=delay - 1)
        assert job.notice is None
        assert needs_settling(job.store.live, dict.fromkeys(known, delay))
        crash(job, request_ages_s=delay)
    assert job.store.live.phase() is Phase.RUNNING


def test_a_newcomer_that_has_trained_becomes_a_regular_member() -> None:
    job = StopJob(3, most=4)
    job.join("w3")
    job.go(settled=True)
    job.agree(STEP, Verdict.NO_TIME)
    job.go(settled=True)
    assert job.head.newcomers == (Newcomer(worker=WorkerId("w3")),)
    job.begun()
    commit(job.store, STEP)
    job.ends(0, code=1)
    job.go()
    assert set(world_of(job.store)) == {"w0", "w1", "w2", "w3"}
    assert not job.head.newcomers


def test_a_crashed_member_gets_a_place_if_it_is_needed() -> None:
    job = crashing()
    job.leaves("w0", "w1")
    job.go(settled=True)
    assert set(world_of(job.store)) == {"w2", "w3"}


def test_the_delay_of_a_newcomer_is_bounded() -> None:
    newcomer = Newcomer(worker=WorkerId("w"), crashes=100)
    assert delay_s(newcomer) == MOST_S
    assert delay_s(dataclasses.replace(newcomer, crashes=0)) == 0
