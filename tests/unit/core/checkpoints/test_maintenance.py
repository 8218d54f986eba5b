from __future__ import annotations

import pytest

from strata.core.checkpoints.fork import decide_fork
from strata.core.checkpoints.lifecycle import decide_delete
from strata.core.checkpoints.maintenance import (
    AdoptRequest,
    MaintenanceKind,
    MaintenanceTask,
    decide_adopt,
    tasks,
)
from strata.core.job import JobView
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import CheckpointNotFound, InvalidArgument, Refused
from tests.not_none import not_none
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB, KEYS


def due(job: KeptJob, host: str = "host-a") -> list[tuple[str, int, str]]:
    return [(c.kind.value, c.step, c.tier) for c in tasks(job.store.job(), host)]


@pytest.fixture
def job() -> KeptJob:
    return KeptJob()


def test_a_tombstone_is_a_maintenance_task_until_its_record_is_removed(job: KeptJob) -> None:
    for step in (20, 40):
        job.save(step)
        job.copy(step)
    assert due(job) == []
    job.policy(latest=1)
    job.mark()
    assert due(job) == [("remove", 20, "primary"), ("remove", 20, "s3")]
    job.removed(20, tier="primary")
    assert due(job) == [("remove", 20, "s3")]
    job.removed(20, tier="s3")
    assert due(job) == []


def test_a_save_that_was_given_up_is_cleared_once_there_is_a_newer_commit(job: KeptJob) -> None:
    job.save(20)
    job.begin(step=40, attempt="x40")
    job.abort(step=40, attempt="x40")
    assert due(job) == [], "a slow rank may still write"
    job.save(60)
    assert due(job) == [("clear", 40, "primary")]
    job.delete(40)
    job.delete(40, finished=True)
    assert due(job) == []


def test_the_bytes_of_a_replaced_attempt_are_still_cleared(job: KeptJob) -> None:
    path = job.begin(step=20, attempt="x20").path
    job.abort(step=20, attempt="x20")
    job.begin(step=20, attempt="y", replaces="x20")
    (task,) = tasks(job.store.job(), "host-a")
    assert task == MaintenanceTask(
        kind=MaintenanceKind.CLEAR,
        step=20,
        generation=1,
        attempt=task.attempt,
        tier="primary",
        path=path,
    )
    for _ in range(2):
        job.removed(20, tier="primary")
    assert due(job) == []
    with pytest.raises(CheckpointNotFound):
        job.delete(20)


def test_a_hosts_own_disk_is_cleared_by_that_host() -> None:
    job = KeptJob(a=1, b=1)
    job.saves(20, 40, tier="disk", shared=False)
    job.policy(latest=1)
    job.mark()
    assert due(job, "host-c") == []
    job.removed(20, tier="disk", host="host-a")
    assert due(job, "host-a") == []
    assert due(job, "host-b") == [("remove", 20, "disk")]
    job.removed(20, tier="disk", host="host-a")
    assert job.record(20).state is CheckpointState.DELETING
    job.removed(20, tier="disk", host="host-b")
    assert 20 not in [e.record.step for e in job.store.job().checkpoints()]


def test_a_fork_has_no_bytes_to_remove(job: KeptJob) -> None:
    job.save(20)
    new = KEYS.job("new")
    job.store.settle(lambda v: decide_fork(JobView(v.view, new), v, step=20))
    assert list(tasks(JobView(job.store.view(), new), "host-a")) == []


# -- adoption ---------------------------------------------------------------------------------


def adopt(job: KeptJob, **more: object) -> None:
    fields = {"step": 40, "attempt": "x40", "manifest_digest": "m", "size_bytes": 5, **more}
    job.store.settle(lambda v: decide_adopt(v, AdoptRequest(**fields)))  # type: ignore[arg-type]  # named fields
    job.sound()


def test_an_aborted_record_with_a_commit_in_storage_is_adopted_without_moving_latest(job: KeptJob) -> None:
    job.save(20)
    job.begin(step=40, attempt="x40")
    job.abort(step=40, attempt="x40")
    job.save(60)
    for _ in range(2):
        adopt(job)
    record = job.record(40)
    assert (record.state, record.manifest_digest) == (CheckpointState.COMMITTED, "m")
    assert not_none(job.store.job().latest()).record.step == 60
    assert due(job) == []


def given_up_incremental() -> KeptJob:
    """Return a job with a Full 20, an Incremental 40 on it, and an aborted Incremental 60 on that."""
    job = KeptJob(20)
    kind = CheckpointType.INCREMENTAL
    job.save(40, "x40", type=kind, base_step=20, base_attempt="x20")
    job.begin(step=60, attempt="x60", type=kind, base_step=40, base_attempt="x40")
    job.abort(step=60, attempt="x60")
    job.save(80)
    job.policy(latest=1)
    return job


def test_an_adopted_incremental_keeps_its_bases() -> None:
    job = given_up_incremental()
    adopt(job, step=60, attempt="x60")
    job.policy(latest=2)
    job.mark()
    assert [job.record(step).state for step in (20, 40, 60)] == [CheckpointState.COMMITTED] * 3
    for step in (20, 40):
        with pytest.raises(Refused):
            job.delete(step)


def test_an_incremental_is_not_adopted_once_its_base_is_deleting() -> None:
    job = given_up_incremental()
    job.mark()
    assert job.record(40).state is CheckpointState.DELETING
    with pytest.raises(Refused, match="which the base needs, is deleting"):
        adopt(job, step=60, attempt="x60")
    assert job.record(60).state is CheckpointState.ABORTED


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("deleted", [40, 60])
def test_adoption_and_deletion_of_a_step_or_its_base_exclude_each_other(deleted: int, first: int) -> None:
    job = given_up_incremental()
    view = job.store.job()
    request = AdoptRequest(step=60, attempt="x60", manifest_digest="m", size_bytes=5)
    both = (
        not_none(decide_adopt(view, request).txn),
        not_none(decide_delete(view, step=deleted, attempt=f"x{deleted}", finished=False).txn),
    )
    assert [job.store.execute(txn).succeeded for txn in (both[first], both[1 - first])] == [True, False]
    job.sound()


def test_only_an_aborted_attempt_is_adopted(job: KeptJob) -> None:
    job.save(20)
    job.begin(step=40, attempt="x40")
    with pytest.raises(Refused, match="is open"):
        adopt(job)
    job.abort(step=40, attempt="x40")
    with pytest.raises(InvalidArgument):
        adopt(job, manifest_digest="")
    with pytest.raises(CheckpointNotFound):
        adopt(job, attempt="y")
    assert job.store.view().get(JOB.latest) is not None
