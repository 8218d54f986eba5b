"""Scaling (a change of the spec while a job trains), and the history of past generations."""

from __future__ import annotations

import pytest

from strata.core.ids import InstanceId
from strata.core.job_requests import decide_scale
from strata.core.kv.records import JobSpec, Phase
from strata.core.kv.txn import Decision
from strata.core.members.membership import decide_register
from strata.core.worlds import planning
from strata.core.worlds.planning import needs_settling
from strata.errors import InvalidArgument, NotFound
from tests.not_none import not_none
from tests.unit.core.rig import (
    JOB,
    KEYS,
    Observer,
    Store,
    leave,
    plan,
    registration,
    world_of,
)
from tests.unit.core.worlds.test_planning import Job, commit, head, phase, standbys


def scale(job: Job, least: int = 0, most: int = 0) -> Decision:
    return job.store.settle(lambda view: decide_scale(view, min_workers=least, max_workers=most))


def spec(job: Job) -> JobSpec:
    return not_none(job.store.live.spec()).record


# -- scaling ----------------------------------------------------------------------------------


def test_scaling_with_zero_keeps_a_limit_and_a_repeat_writes_nothing() -> None:
    job = Job(1)
    assert "now takes 2 to 5" in decide_scale(job.store.live, max_workers=5).reason
    scale(job, most=5)
    assert (spec(job).min_workers, spec(job).max_workers) == (2, 5)
    before = job.store.revision
    assert "takes 2 to 5" in scale(job, least=2, most=5).reason
    assert job.store.revision == before
    scale(job, least=3)
    assert (spec(job).min_workers, spec(job).max_workers) == (3, 5)


@pytest.mark.parametrize(("least", "most"), [(4, 0), (0, 1), (-1, 0), (0, -5), (5, 4), (1, 100_000)])
def test_limits_that_make_no_sense_are_refused(least: int, most: int) -> None:
    job = Job(1)
    with pytest.raises(InvalidArgument):
        scale(job, least, most)
    assert (spec(job).min_workers, spec(job).max_workers) == (2, 3)


def test_a_job_that_does_not_exist_is_not_scaled() -> None:
    with pytest.raises(NotFound):
        Store().settle(lambda view: decide_scale(view, max_workers=2))


def test_a_job_shrinks_at_once_and_its_highest_ranks_stand_by() -> None:
    job = Job(3, least=1)
    job.go()
    scale(job, most=2)
    assert "the job takes 2 members now" in job.go()
    assert (world_of(job.store), head(job.store).no_progress) == ({"w0": (0, 0), "w1": (1, 1)}, 0)
    assert standbys(job.store) == ("w2",)


def test_a_job_grows_once_its_members_have_settled() -> None:
    job = Job(4)
    job.go()
    scale(job, most=4)
    job.go()
    assert head(job.store).generation == 1
    assert needs_settling(job.store.live, {})
    job.go(settled=True)
    assert len(world_of(job.store)) == 4


def test_a_higher_min_applies_from_the_next_world_on() -> None:
    job = Job(2)
    job.go(settled=True)
    scale(job, 3, 4)
    assert "goes on" in job.go(settled=True)
    assert "2 of at least 3 members are left" in job.play("exit 0 1, settle")
    assert head(job.store).forming


def test_a_finishing_world_does_not_shrink() -> None:
    job = Job(3, least=1)
    job.play("go, exit 0 0")
    scale(job, most=2)
    assert "goes on" in job.go()


def test_a_plan_for_outdated_worker_limits_fails() -> None:
    job = Job(4, least=1)
    job.go()
    leave(job.store, "w0")
    lagging = Observer(job.store)
    scale(job, most=2)
    late = planning.plan_world(
        lagging.job, keys=KEYS, epoch=job.epoch, settled=False, request_ages_s={}, now_unix_ms=0
    )
    assert not job.store.execute(late.txns[0]).succeeded
    job.go()
    assert len(world_of(job.store)) == 2


# -- the number of generations ----------------------------------------------------------------


def limited(most: int) -> Job:
    job = Job(0, limit=100)
    job.spec["max_generations"] = most
    job.play("join w0, join w1, join w2, go")
    return job


@pytest.mark.parametrize(
    ("most", "story", "last"),
    [
        (2, "commit 10, exit 0 1, go, commit 20, exit 1 7, go", "rank 1 of w1 failed (exit code 7)"),
        (1, "leave w0, go", "w0 is gone"),
    ],
)
def test_max_generations_failures_fail_the_job_and_a_resume_resets_the_count(
    most: int, story: str, last: str
) -> None:
    job = limited(most)
    assert f"{most} generations failed, as many as max_generations allows" in job.play(story)
    failed = not_none(phase(job.store))
    assert failed.phase is Phase.FAILED
    assert last in failed.reason
    again = registration("w9", resume=True)
    job.store.settle(lambda view: decide_register(view, again, served_by=InstanceId("i-r1")))
    job.go(settled=True)
    assert (head(job.store).failures, head(job.store).members) == (0, 3)


def test_growth_and_shrinking_and_forming_worlds_count_as_no_failure() -> None:
    job = limited(2)
    scale(job, least=1, most=2)
    job.go()
    scale(job, most=3)
    job.go(settled=True)
    assert (head(job.store).generation, head(job.store).failures) == (3, 0)
    scale(job, least=3)
    job.play("leave w0, go")
    assert (head(job.store).forming, head(job.store).failures) == (True, 1)
    job.play("join w0, go")
    assert (head(job.store).members, head(job.store).failures) == (3, 1)


# -- history ----------------------------------------------------------------------------------


def test_history_records_each_generations_reason_and_committed_step() -> None:
    job = Job(3)
    job.play("go, commit 20, leave w1, go, leave w2, go")
    first, second, third = (entry.record for entry in job.store.live.history())
    assert "all 3 members" in first.reason
    assert (first.members, first.size, first.failure, first.restore) == (3, 3, False, None)
    assert (first.committed_step, second.committed_step) == (20, None)
    assert "w1 is gone" in second.reason
    assert (second.failure, not_none(second.restore).step, third.members) == (True, 20, 0)
    assert first.began_unix_ms < second.began_unix_ms < third.began_unix_ms


def test_a_checkpoint_that_comes_between_plan_and_head_is_in_the_history() -> None:
    job = Job(3)
    job.play("go, leave w1")
    planned = plan(job.store, job.epoch)
    commit(job.store, 20)
    assert not job.store.execute(planned.txns[0]).succeeded
    job.go()
    assert job.store.live.history()[0].record.committed_step == 20


def test_old_history_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "HISTORY_KEPT", 3)
    job = Job(3, limit=100)
    job.play("go" + ", exit 0 1, go" * 6)
    assert [int(entry.name) for entry in job.store.live.history()] == [5, 6, 7]


def test_a_world_of_an_older_version_has_no_history_and_gets_one() -> None:
    job = Job(3)
    job.go()
    job.store.delete(JOB.history_of(1))
    job.play("commit 5, leave w0, go")
    assert [int(entry.name) for entry in job.store.live.history()] == [2]
