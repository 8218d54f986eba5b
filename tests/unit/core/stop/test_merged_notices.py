"""Several stop requests for one generation: its one notice merges them all."""

from __future__ import annotations

from typing import Any

import pytest

from strata.core.ids import WorkerId
from strata.core.job_requests import decide_resume
from strata.core.kv.records import Phase
from strata.core.stop.notices import MAX_NAMED
from strata.core.stop.requests import LATE_S, StopRequest, decide_stop, next_deadline_s
from strata.errors import Refused
from tests.not_none import not_none
from tests.unit.core.rig import Observer, plan, world_of
from tests.unit.core.stop_job import DRAIN, GRACE_S, PAUSE, PREEMPT, Job


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.mark.parametrize(
    ("held", "requested", "holds"),
    [
        ((DRAIN, "w0", 50), (DRAIN, "w1", 60), (DRAIN, "w0 w1", 50)),
        ((DRAIN, "w0", 50), (DRAIN, "w0 w1", 40), (DRAIN, "w0 w1", 40)),
        ((DRAIN, "w0", 50), (DRAIN, "w1", 0), (DRAIN, "w0 w1", 0)),
        ((DRAIN, "w0", 50), (DRAIN, "w0", 25), (DRAIN, "w0", 25)),
        ((DRAIN, "w0", 50), (PREEMPT, "", 60), (PREEMPT, "", 50)),
        ((DRAIN, "w0", 50), (PREEMPT, "", 25), (PREEMPT, "", 25)),
        ((DRAIN, "w0", 50), (PREEMPT, "", 0), (PREEMPT, "", 0)),
        ((DRAIN, "w0", 50), (PAUSE, "", 25), (DRAIN, "w0", 25)),
        ((PREEMPT, "", 50), (DRAIN, "w0", 25), (PREEMPT, "", 25)),
        ((PREEMPT, "", 50), (PREEMPT, "", 60), (PREEMPT, "", 50)),
        ((PREEMPT, "", 50), (PAUSE, "", 25), (PREEMPT, "", 25)),
        ((PAUSE, "", 50), (DRAIN, "w0", 25), (DRAIN, "w0", 25)),
        ((PAUSE, "", 50), (PREEMPT, "", 25), (PREEMPT, "", 25)),
        ((PAUSE, "", 50), (PREEMPT, "", 0), (PREEMPT, "", 0)),
    ],
)
def test_one_notice_merges_all_stop_requests(job: Job, held: Any, requested: Any, holds: Any) -> None:
    written = []
    for action, names, grace_ms in (held, requested, requested, held):
        job.stop(action, *names.split(), grace_ms=grace_ms, now=not grace_ms)
        written.append(job.store.revision)
    assert written[0] <= written[1] <= written[0] + 1
    assert written[1] == written[2] == written[3], "what is said already is not written again"
    action, names, grace_ms = holds
    found = not_none(job.notice)
    assert (found.action, " ".join(found.workers), found.grace_ms) == (action, names, grace_ms)
    assert job.store.problems() == []


@pytest.mark.parametrize("leaves", [(DRAIN, "w1"), (PREEMPT,)], ids=["a drain", "a preemption"])
@pytest.mark.parametrize("first", ["the pause", "the other"])
def test_a_pause_and_a_request_to_leave_are_both_done(job: Job, leaves: Any, first: str) -> None:
    requests: list[Any] = [(PAUSE,), leaves]
    for request in requests if first == "the pause" else reversed(requests):
        job.stop(*request)
    assert job.notice is not None
    assert (job.notice.action, job.notice.pause) == (leaves[0], True)
    assert "being paused" in str(decide_resume(job.store.live).refusal)
    job.ends(*range(6))
    job.go()
    assert job.store.live.phase() is Phase.PAUSED
    assert (job.head.generation, job.head.forming, job.head.no_progress) == (2, True, 0)
    job.store.settle(decide_resume)
    job.go(settled=True)
    assert set(world_of(job.store)) == ({"w0", "w2"} if leaves[0] is DRAIN else set()), (
        "who leaves gets no place"
    )


def test_a_pause_during_a_drain_holds_when_a_rank_fails_first(job: Job) -> None:
    job.stop(DRAIN, "w1")
    job.stop(PAUSE)
    job.ends(0, code=1)
    assert "paused" in job.go()
    assert (job.store.live.phase(), job.head.forming) == (Phase.PAUSED, True)


def test_members_drained_at_the_same_time_leave_in_one_generation_and_none_of_them_failed() -> None:
    job = Job(4, least=1, most=4)
    job.stop(DRAIN, "w1")
    job.stop(DRAIN, "w3")
    job.ends(2, 3)
    assert "have a stop request" in job.go(settled=True)
    assert job.head.generation == 1, "who was drained later has not stopped yet"
    job.ends(6, 7)
    job.leaves("w1", "w3")
    assert "w1, w3 drained: maintenance" in job.go()
    assert (job.head.generation, set(world_of(job.store)), job.head.failures) == (2, {"w0", "w2"}, 0)


def test_one_of_two_racing_drains_fails_and_must_be_decided_again(job: Job) -> None:
    lagging = Observer(job.store)
    job.stop(DRAIN, "w1")
    late = decide_stop(lagging.job, StopRequest(action=DRAIN, workers=(WorkerId("w0"),)))
    assert not job.store.execute(not_none(late.txn)).succeeded, "or the other one would be forgotten"


def test_a_drain_races_the_end_of_the_generation() -> None:
    """The leader's plan keeps a place for w2; it must not take effect once a notice names w2."""
    job = Job(4)
    job.stop(DRAIN, "w1")
    job.ends(2, 3)
    planned = plan(job.store, job.epoch)
    job.stop(DRAIN, "w2")
    assert not job.store.execute(planned.txns[0]).succeeded
    job.ends(4, 5)
    job.go()
    assert set(world_of(job.store)) == {"w0", "w3"}


def test_a_member_that_reuses_a_drained_name_is_not_drained_by_a_later_notice() -> None:
    job = Job(3, least=1)
    job.stop(DRAIN, "w1")
    job.ends(2, 3)
    job.leaves("w1")
    job.join("w1")
    job.stop(DRAIN, "w2")
    job.ends(4, 5)
    job.go(settled=True)
    assert set(world_of(job.store)) == {"w0", "w1"}


def test_a_preemption_after_a_drain_covers_all_members_present_by_then() -> None:
    job = Job(3, least=1, most=4)
    job.stop(DRAIN, "w1")
    job.join("w3")
    job.stop(PREEMPT)
    job.join("w4")
    job.stop(PREEMPT, grace_ms=1000)
    job.ends(*range(6))
    job.go(settled=True)
    assert (job.head.generation, set(world_of(job.store))) == (2, {"w4"})


def test_a_standby_that_reused_a_members_name_is_not_drained(job: Job) -> None:
    job.stop(DRAIN, "w0")
    job.leaves("w1")
    job.join("w1")
    with pytest.raises(Refused, match="w1 stands by"):
        job.stop(DRAIN, "w1")


def test_members_beyond_the_limit_of_one_notice_are_drained_in_a_later_one() -> None:
    job = Job(MAX_NAMED + 2, least=1, most=MAX_NAMED + 2)
    job.stop(DRAIN, *(f"w{n}" for n in range(MAX_NAMED)))
    assert "already" in job.stop(DRAIN, f"w{MAX_NAMED}").reason
    assert job.notice is not None
    assert f"w{MAX_NAMED}" not in job.notice.workers


def test_each_added_name_restarts_the_deadline_of_a_notice() -> None:
    job = Job(3, least=1)
    job.stop(DRAIN, "w0")
    first = job.store.revision
    job.stop(DRAIN, "w1")
    known = {first: GRACE_S + LATE_S, job.store.revision: 0.0}
    assert next_deadline_s(job.store.live, known) == GRACE_S + LATE_S
