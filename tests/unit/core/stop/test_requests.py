"""Notices: which ranks must leave, which have stopped, what follows, and which members get no place afterwards."""

from __future__ import annotations

import pytest

from strata.core.ids import WorkerId
from strata.core.job_requests import decide_resume
from strata.core.kv.records import JobPhase, Phase, StopNotice
from strata.core.kv.txn import Decision
from strata.core.members.membership import decide_rank_exit
from strata.core.stop.notices import MAX_NAMED
from strata.core.stop.requests import (
    LATE_S,
    LEAVE_EXPIRY_S,
    MAX_GRACE_MS,
    StopRequest,
    decide_stop,
    next_deadline_s,
)
from strata.core.worlds.planning import needs_settling
from strata.errors import InvalidArgument, NotFound, Refused, StaleGeneration
from tests.not_none import not_none
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB, Observer, carry_out, plan, register, world_of
from tests.unit.core.stop_job import DRAIN, GRACE_S, PAUSE, PREEMPT, Job

# -- stop requests ----------------------------------------------------------------------------


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_notice_is_written_once_and_a_second_request_is_answered_with_the_first(job: Job) -> None:
    assert (
        "has a stop request (preempt): maintenance"
        in decide_stop(job.store.live, StopRequest(action=PREEMPT, reason="maintenance")).reason
    )
    job.stop(PREEMPT, grace_ms=5000)
    assert job.notice == StopNotice(action=PREEMPT, reason="maintenance", grace_ms=5000)
    before = job.store.revision
    assert "has a stop request already" in job.stop(DRAIN, "w1").reason
    assert "has a stop request already" in job.stop(PREEMPT, grace_ms=6000).reason
    assert job.store.revision == before


def test_a_request_races_the_next_generation(job: Job) -> None:
    lagging = Observer(job.store)
    job.leaves("w0")
    job.go()
    late = decide_stop(lagging.job, StopRequest(action=PREEMPT))
    assert not job.store.execute(not_none(late.txn)).succeeded
    with pytest.raises(StaleGeneration):
        job.stop(PREEMPT, generation=1)
    job.stop(PREEMPT, generation=2)
    assert job.notice is not None


def test_a_stop_request_for_a_stopped_generation_is_done(job: Job) -> None:
    job.stop(PREEMPT)
    job.ends(*range(6))
    job.go()
    assert job.head.generation == 2
    assert "has ended" in job.stop(PREEMPT, generation=1).reason


@pytest.mark.parametrize(
    "request_",
    [
        StopRequest(action=DRAIN),
        StopRequest(action=PREEMPT, workers=(WorkerId("w1"),)),
        StopRequest(action=DRAIN, workers=tuple(WorkerId(f"w{n}") for n in range(MAX_NAMED + 1))),
        StopRequest(action=DRAIN, workers=(WorkerId("../w1"),)),
        StopRequest(action=PREEMPT, grace_ms=-1),
        StopRequest(action=PREEMPT, grace_ms=MAX_GRACE_MS + 1),
        StopRequest(action=PREEMPT, generation=-1),
    ],
)
def test_nonsense_is_refused(request_: StopRequest) -> None:
    with pytest.raises(InvalidArgument):
        decide_stop(Job().store.live, request_)


def test_only_members_of_the_world_are_drained() -> None:
    job = Job(4)
    with pytest.raises(Refused, match="w3 stands by"):
        job.stop(DRAIN, "w3")
    with pytest.raises(NotFound, match="no member w9"):
        job.stop(DRAIN, "w9")
    assert job.notice is None


def test_a_job_without_running_ranks_cannot_be_stopped() -> None:
    job = Job(1)
    assert "nothing to stop" in job.stop(PREEMPT).reason
    full = Job()
    full.ends(*range(6), code=0)
    full.go()
    with pytest.raises(Refused, match="has ended"):
        full.stop(PREEMPT)


def test_a_long_reason_is_cut(job: Job) -> None:
    job.store.settle(lambda view: decide_stop(view, StopRequest(action=PREEMPT, reason="x" * 10_000)))
    assert job.notice is not None
    assert len(job.notice.reason) == 500


# -- ranks that stop --------------------------------------------------------------------------


def test_code_75_is_a_failure_unless_a_stop_was_requested(job: Job) -> None:
    job.ends(0)
    assert set(job.store.live.failed(1)) == {0}
    preempted = Job()
    preempted.stop(PREEMPT)
    preempted.ends(2, code=1)
    preempted.ends(0)
    preempted.ends(1, code=0)
    live = preempted.store.live
    assert (live.stopped(1), live.done(1), set(live.failed(1))) == ({0}, {1}, {2})
    preempted.ends(0, code=1)
    assert preempted.store.live.stopped(1) == {0}, "the first report counts"


@pytest.mark.parametrize("code", [1, -15, -9, -11])
def test_a_rank_that_ends_after_a_requested_stop_of_another_counts_as_stopped(code: int) -> None:
    """The stopped rank's departure breaks the other ranks' collectives, or these ranks are ended together with it."""
    job = Job(max_no_progress_generations=1)
    job.stop(PREEMPT)
    job.ends(0)
    job.ends(1, 2, 3, 4, 5, code=code)
    assert (job.store.live.stopped(1), job.store.live.failed(1)) == (set(range(6)), {})
    job.go()
    assert (job.head.forming, job.head.no_progress, job.head.failures) == (True, 0, 0)


def test_a_failed_rank_of_a_survivor_during_a_drain_counts_as_no_failure() -> None:
    job = Job(max_generations=1)
    job.stop(DRAIN, "w1")
    job.ends(2)
    job.ends(0, code=1)
    job.ends(3)
    assert "w1 drained" in job.go()
    assert (job.head.generation, job.head.failures) == (2, 0)
    job.ends(0, code=1)
    assert job.store.live.failed(2), "the next generation was asked nothing"


def test_an_exit_races_the_notice(job: Job) -> None:
    """The replica that receives the exit lacks the notice in its view, so it must decide again."""
    lagging = Observer(job.store)
    job.stop(PREEMPT)
    member = not_none(job.store.live.world()).member_of(0)
    late = decide_rank_exit(lagging.job, member.worker, member.incarnation, 1, 0, 75)
    assert not job.store.execute(not_none(late.txn)).succeeded
    crash = decide_rank_exit(lagging.job, member.worker, member.incarnation, 1, 0, 1)
    assert job.store.execute(not_none(crash.txn)).succeeded


# -- preemption -------------------------------------------------------------------------------


def test_a_preempted_world_ends_when_all_ranks_stopped_and_places_none_of_them(job: Job) -> None:
    job.stop(PREEMPT)
    job.ends(0, 1, 2, 3, 4)
    assert "have a stop request" in job.go(settled=True)
    assert job.head.generation == 1
    job.ends(5)
    assert "preempted: maintenance" in job.go(settled=True)
    assert (job.head.generation, job.head.forming, job.head.no_progress) == (2, True, 0)
    assert job.store.live.phase() is Phase.RUNNING
    job.go(settled=True)
    assert job.head.generation == 2, "those who pack up get no place"
    job.leaves("w0")
    job.join("w0")
    job.join("w3")
    assert "2 members, at least 2" in job.go(settled=True)
    assert set(world_of(job.store)) == {"w0", "w3"}, "a newcomer is not meant, whatever its name"
    job.leaves("w1", "w2")
    job.go()
    assert (job.head.generation, job.head.members) == (3, 2)


def test_a_preempted_job_goes_on_when_all_are_back(job: Job) -> None:
    job.stop(PREEMPT)
    job.ends(*range(6))
    job.go()
    job.leaves("w0", "w1", "w2")
    for name in ("w0", "w1", "w2"):
        job.join(name)
    assert "all 3 members are here" in job.go()
    assert (job.head.generation, job.head.members, job.head.leave_requests) == (3, 3, ())


def test_a_member_that_leaves_early_ends_a_preempted_world_at_once() -> None:
    job = Job(max_no_progress_generations=1)
    job.stop(PREEMPT)
    job.ends(0)
    job.leaves("w1")
    assert "w1 is gone, as requested" in job.go(settled=True)
    assert (job.head.generation, job.head.forming) == (2, True)
    assert job.head.no_progress == 0, "no fault of the job's"


def test_a_rank_that_fails_under_a_notice_is_a_failure_as_ever() -> None:
    job = Job(max_no_progress_generations=1)
    job.stop(PREEMPT)
    job.ends(0, code=1)
    job.go()
    assert job.store.live.phase() is Phase.FAILED


def test_the_wait_for_ranks_that_never_stop_is_bounded(job: Job) -> None:
    job.stop(PREEMPT)
    job.ends(0)
    assert plan(job.store, job.epoch).again_s == pytest.approx(GRACE_S + LATE_S)
    job.go(request_ages_s=GRACE_S + LATE_S - 1)
    assert job.head.generation == 1
    assert "the ranks had not stopped in time" in job.go(request_ages_s=GRACE_S + LATE_S)
    assert (job.head.generation, job.head.forming) == (2, True)
    job.go(settled=True, request_ages_s=GRACE_S + LEAVE_EXPIRY_S - 1)
    assert job.head.generation == 2
    assert not needs_settling(job.store.live, {})
    assert "all 3 members are here" in job.go(request_ages_s=GRACE_S + LEAVE_EXPIRY_S), (
        "they did not leave: they train"
    )
    assert job.head.leave_requests == ()


def test_a_death_under_a_preemption_begins_a_world_of_later_members(job: Job) -> None:
    job.stop(PREEMPT)
    job.join("w3")
    job.join("w4")
    job.leaves("w1")
    job.go()
    assert set(world_of(job.store)) == {"w3", "w4"}


# -- draining ---------------------------------------------------------------------------------


def test_a_drained_member_is_left_out_while_the_others_go_on(job: Job) -> None:
    job.stop(DRAIN, "w1")
    job.ends(2)
    job.go(settled=True)
    assert job.head.generation == 1
    job.ends(3)
    assert "w1 drained: maintenance" in job.go(settled=True)
    assert world_of(job.store) == {"w0": (0, 0), "w2": (1, 2)}
    assert [request.notice.workers for request in job.head.leave_requests] == [("w1",)]
    job.go(settled=True)
    assert job.head.generation == 2, "it is here, and not for growth"
    job.leaves("w1")
    job.join("w1")
    job.go(settled=True)
    assert (job.head.generation, job.head.members, job.head.leave_requests) == (3, 3, ())


def test_a_drained_member_may_leave_without_reporting_its_ranks(job: Job) -> None:
    job.stop(DRAIN, "w1", now=True)
    job.leaves("w1")
    assert "w1 is gone, as requested" in job.go()
    assert (set(world_of(job.store)), job.head.no_progress) == ({"w0", "w2"}, 0)


def test_a_standby_takes_the_place_of_the_drained() -> None:
    job = Job(4)
    job.stop(DRAIN, "w0")
    job.ends(0, 1)
    job.go()
    assert set(world_of(job.store)) == {"w1", "w2", "w3"}


def test_a_drain_below_the_minimum_leaves_a_forming_world() -> None:
    job = Job(2)
    job.stop(DRAIN, "w0")
    job.ends(0, 1)
    job.go(settled=True)
    assert job.head.forming


def test_a_finished_member_is_not_drained_any_more(job: Job) -> None:
    job.stop(DRAIN, "w1")
    job.ends(2, 3, code=0)
    job.go(settled=True, request_ages_s=GRACE_S + LATE_S)
    assert job.head.generation == 1, "the others are about to finish"
    job.ends(0, 1, 4, 5, code=0)
    job.go()
    assert job.store.live.phase() is Phase.DONE


def test_drains_one_after_the_other_are_all_remembered() -> None:
    job = Job(5, least=1, most=5)
    for name, first in (("w1", 2), ("w3", None)):
        job.stop(DRAIN, name)
        member = next(m for m in not_none(job.store.live.world()).members if m.worker == name)
        assert first in {None, member.first_rank}
        job.ends(member.first_rank, member.first_rank + 1)
        job.go(settled=True)
    assert set(world_of(job.store)) == {"w0", "w2", "w4"}
    assert [request.notice.workers for request in job.head.leave_requests] == [("w1",), ("w3",)]


# -- pausing ----------------------------------------------------------------------------------


def resume(job: Job) -> Decision:
    return job.store.settle(decide_resume)


def test_a_job_pauses_when_all_have_stopped_and_goes_on_when_resumed(job: Job) -> None:
    job.stop(PAUSE)
    with pytest.raises(Refused, match="being paused"):
        resume(job)
    job.ends(*range(6))
    assert "paused: maintenance" in job.go()
    assert job.store.live.phase() is Phase.PAUSED
    assert (job.head.generation, job.head.forming, job.head.leave_requests) == (2, True, ())
    assert "is paused" in job.go(settled=True)
    assert "no rank runs" in job.stop(PREEMPT).reason
    job.join("w3")
    job.go(settled=True)
    assert job.head.generation == 2
    resume(job)
    assert "all 3 members are here" in job.go()
    assert (job.head.generation, job.head.members) == (3, 3)
    assert "is running" in resume(job).reason


def test_an_immediate_pause_ends_the_generation(job: Job) -> None:
    job.stop(PAUSE, now=True)
    assert job.store.live.phase() is Phase.PAUSED
    assert not job.head.forming
    assert "the job is paused" in job.go()
    assert (job.head.generation, job.head.forming) == (2, True)


def test_a_job_resumed_before_the_leader_saw_its_pause_starts_a_new_generation(job: Job) -> None:
    job.stop(PAUSE, now=True)
    resume(job)
    job.go()
    assert (job.head.generation, job.head.members) == (2, 3)


def test_preempted_members_leave_if_the_job_resumes_before_the_leader_saw_its_pause(
    job: Job,
) -> None:
    """If they stayed, all ranks would train on, and no notice could be written until the request is removed."""
    job.stop(PREEMPT)
    job.stop(PAUSE, now=True)
    resume(job)
    assert "the job was resumed; 0 of at least 2 members are left" in job.go()
    assert (job.head.generation, job.head.forming) == (2, True)
    assert [one.notice.action for one in job.head.leave_requests] == [PREEMPT]
    job.leaves("w0", "w1", "w2")
    job.join("w3")
    job.go(settled=True)
    assert job.head.generation == 2
    job.join("w4")
    job.go(settled=True)
    assert (job.head.generation, job.head.members) == (3, 2)


def test_preempted_members_leave_even_if_only_they_have_the_checkpoint() -> None:
    job = KeptJob()
    job.save(20, tier="disk", shared=False)
    register(job.store, "b")
    job.store.settle(lambda view: decide_stop(view, StopRequest(action=PREEMPT)))
    register(job.store, "c")  # now there are enough members for a world, and none of them has step 20
    job.store.settle(lambda view: decide_stop(view, StopRequest(action=PAUSE, now=True)))
    job.store.settle(decide_resume)
    assert "lies on the disks of other hosts" in carry_out(job.store, job.epoch, settled=True)
    head = not_none(job.store.live.head())
    assert (head.record.generation, head.record.forming) == (2, True)
    assert "no world begins" in carry_out(job.store, job.epoch, settled=True)


def test_a_resumed_world_ends_when_a_member_death_leaves_too_few(job: Job) -> None:
    job.stop(PAUSE, now=True)
    resume(job)
    job.leaves("w1", "w2")
    assert "the job was resumed; 1 of at least 2 members are left" in job.go()
    assert (job.head.generation, job.head.forming) == (2, True)


def test_the_finished_world_of_a_restarted_job_is_left_unchanged(job: Job) -> None:
    job.ends(*range(6), code=0)
    job.go()
    assert job.store.live.phase() is Phase.DONE
    job.leaves("w1", "w2")
    job.store.put(JOB.phase, JobPhase(phase=Phase.RUNNING, reason="resumed", attempt=2))
    job.go(settled=True)
    assert (job.head.generation, job.head.forming) == (1, False)


def test_a_job_without_ranks_is_paused_at_once() -> None:
    job = Job(1)
    job.stop(PAUSE)
    assert job.store.live.phase() is Phase.PAUSED
    job.join("w1")
    job.go(settled=True)
    assert job.store.live.head() is None
    resume(job)
    job.go(settled=True)
    assert job.head.members == 2


def test_a_death_while_a_job_pauses_completes_the_pause(job: Job) -> None:
    job.stop(PAUSE)
    job.ends(0)
    job.leaves("w2")
    assert "w2 is gone; paused" in job.go()
    assert job.store.live.phase() is Phase.PAUSED
    assert job.head.forming


def test_a_pause_that_is_late_pauses_all_the_same(job: Job) -> None:
    job.stop(PAUSE)
    job.go(request_ages_s=GRACE_S + LATE_S)
    assert job.store.live.phase() is Phase.PAUSED


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.FAILED])
def test_an_ended_job_cannot_be_resumed(job: Job, phase: Phase) -> None:
    job.store.put(JOB.phase, JobPhase(phase=phase, reason="so"))
    with pytest.raises(Refused, match=f"is {phase.value}"):
        resume(job)


# -- the transactions' compares ---------------------------------------------------------------


def test_a_plan_made_before_a_notice_is_not_written() -> None:
    """Otherwise the plan would give a place to a member that must leave."""
    job = Job(4)
    job.leaves("w0")
    planned = plan(job.store, job.epoch)
    job.stop(DRAIN, "w1")
    assert not job.store.execute(planned.txns[0]).succeeded
    job.go()
    assert set(world_of(job.store)) == {"w2", "w3"}


def test_the_next_deadline_of_a_notice_covers_each_of_its_stages(job: Job) -> None:
    assert next_deadline_s(job.store.live, {}) is None
    job.stop(PREEMPT, grace_ms=1000)
    held = not_none(job.store.live.notice(1))
    known = {held.create_revision: 0.0}
    assert next_deadline_s(job.store.live, known) == 1 + LATE_S
    known[held.create_revision] = 1 + LATE_S
    assert next_deadline_s(job.store.live, known) == LEAVE_EXPIRY_S - LATE_S
    known[held.create_revision] = 1 + LEAVE_EXPIRY_S
    assert next_deadline_s(job.store.live, known) is None
