"""Deletion of a job: all keys must go in one step, and never while a member or reader uses the job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strata.core.ids import InstanceId
from strata.core.job_requests import decide_delete
from strata.core.kv.records import Phase, Pin
from strata.core.members.membership import decide_register
from strata.errors import Refused
from tests.not_none import not_none
from tests.unit.core.rig import JOB, Observer, leave, plan, registration, world_of
from tests.unit.core.worlds.test_planning import Job, commit, ends, head


def finished() -> Job:
    """Return a job that has trained, saved, and is done; its members have left."""
    job = Job(2)
    job.go(settled=True)
    commit(job.store, 20)
    ends(job.store, 0, 0)
    ends(job.store, 1, 0)
    job.go()
    leave(job.store, "w0")
    leave(job.store, "w1")
    assert job.store.live.phase() is Phase.DONE
    return job


def test_a_deleted_job_leaves_no_key_and_its_name_can_be_reused() -> None:
    job = finished()
    job.store.settle(decide_delete)
    assert list(job.store.view().walk(JOB.root)) == []
    assert job.store.problems() == []
    assert "no job job exists" in job.store.settle(decide_delete).reason
    job.join("w0")
    job.join("w1")
    job.go(settled=True)
    assert (head(job.store).generation, head(job.store).restore) == (1, None)
    assert set(world_of(job.store)) == {"w0", "w1"}


PIN = Pin(who="ada", why="figure 3")


def comes(job: Job) -> None:
    again = registration("w9", resume=True)
    job.store.settle(lambda view: decide_register(view, again, served_by=InstanceId("i-r1")))


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (comes, "has 1 members: w9"),
        (lambda job: job.store.put(JOB.pin(20, "a20"), PIN), "pinned checkpoints, of step 20"),
    ],
)
def test_a_job_with_a_member_or_a_pin_is_not_deleted(use: Callable[[Job], object], words: str) -> None:
    job = finished()
    use(job)
    with pytest.raises(Refused, match=words):
        job.store.settle(decide_delete)
    assert job.store.live.exists


@pytest.mark.parametrize(
    "change",
    [
        comes,
        lambda job: job.store.put(JOB.pin(20, "a20"), PIN),
        lambda job: job.store.put(JOB.latest, not_none(job.store.live.latest()).record),
    ],
    ids=["member", "pin", "latest"],
)
def test_a_new_member_pin_or_commit_makes_a_planned_deletion_fail(change: Callable[[Job], object]) -> None:
    job = finished()
    txn = not_none(decide_delete(Observer(job.store).job).txn)
    change(job)
    assert not job.store.execute(txn).succeeded
    assert job.store.live.exists


def test_late_writes_for_a_deleted_job_do_not_reach_its_successor() -> None:
    """A registration and a leader's world, both decided on views before the deletion."""
    job = Job(2)
    late = plan(job.store, job.epoch, settled=True).txns
    leave(job.store, "w0")
    leave(job.store, "w1")
    lagging = Observer(job.store)
    newcomer = registration("w5")
    registers = not_none(decide_register(lagging.job, newcomer, served_by=InstanceId("i-r1")).txn)
    job.store.settle(decide_delete)
    assert not job.store.execute(registers).succeeded, "it would be a member of a job without a spec"
    job.join("w0")
    for txn in late:
        assert not job.store.execute(txn).succeeded
    assert job.store.live.head() is None
    assert job.store.problems() == []
