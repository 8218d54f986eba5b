"""A finished job resumed or restarted by name: `strata run --resume`, or `--new`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strata.core.checkpoints.order import superseded
from strata.core.ids import InstanceId
from strata.core.kv.records import CheckpointState, JobPhase, Phase
from strata.core.members.membership import decide_register
from strata.core.stop.requests import waits_for
from strata.errors import JobFailed
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import Job as SavingJob
from tests.unit.core.rig import JOB, Store, carry_out, lead, leave, register, registration
from tests.unit.core.worlds.test_planning import commit, ends, head

SPEC = {"min_workers": 2, "max_workers": 2, "max_no_progress_generations": 1}


def resume(store: Store, worker: str, *, incarnation: int = 0) -> None:
    again = registration(worker, boot=f"again-{worker}", resume=True, incarnation=incarnation)
    store.settle(lambda job: decide_register(job, again, served_by=InstanceId("i-r1")))


def finished(store: Store, code: int) -> int:
    """Let a job of two run to its end; return the leader's epoch."""
    epoch = lead(store)
    for worker in ("w0", "w1"):
        register(store, worker, **SPEC)
    carry_out(store, epoch)
    if code == 0:
        commit(store, 20)
    ends(store, 0, code)
    if code == 0:
        ends(store, 1, 0)
    carry_out(store, epoch)
    for worker in ("w0", "w1"):
        leave(store, worker)
    return epoch


def test_a_resumed_done_job_restores_its_checkpoint_once_its_members_joined(store: Store) -> None:
    epoch = finished(store, 0)
    resume(store, "w0")
    assert "2 are needed" in carry_out(store, epoch, settled=True)
    resume(store, "w1")
    assert "all 2 members are here" in carry_out(store, epoch)
    assert head(store).generation == 2
    assert head(store).restore is not None
    assert store.problems() == []
    ends(store, 0, 0)
    ends(store, 1, 0)
    assert "is done" in carry_out(store, epoch)


def test_a_resumed_job_reports_how_many_members_it_waits_for(store: Store) -> None:
    epoch = finished(store, 0)
    assert waits_for(store.job()) == "", "it is done"
    resume(store, "w0")
    assert waits_for(store.job()) == "1 of at least 2 members are here"
    resume(store, "w1")
    carry_out(store, epoch)
    register(store, "w2")
    assert waits_for(store.job()) == "", "it stands by"


def test_a_failed_job_begins_with_a_clean_count(store: Store) -> None:
    epoch = finished(store, 1)
    with pytest.raises(JobFailed, match="in a row"):
        register(store, "w0")
    for worker in ("w0", "w1"):
        resume(store, worker)
    carry_out(store, epoch)
    assert (head(store).generation, head(store).no_progress) == (2, 0)
    assert store.problems() == []


def anew(store: Store, worker: str, **more: Any) -> None:
    again = registration(worker, boot=f"anew-{worker}", **more)
    again = replace(again, anew=True)
    store.settle(lambda job: decide_register(job, again, served_by=InstanceId("i-r1")))


def test_a_job_restarted_with_new_restores_nothing_and_keeps_its_checkpoints(store: Store) -> None:
    epoch = finished(store, 0)
    anew(store, "w0", min_workers=1, max_workers=2)
    anew(store, "w1", min_workers=9, max_workers=9)  # a later node of the same run only joins
    assert "all 2 members are here" in carry_out(store, epoch)
    assert (head(store).generation, head(store).restore, store.live.anew()) == (2, None, 1)
    spec = not_none(store.live.spec())
    assert (spec.record.min_workers, spec.record.max_workers) == (1, 2)
    kept = not_none(store.live.checkpoint(20, 1))
    assert kept.record.state is CheckpointState.COMMITTED
    assert superseded(store.live, kept.record)
    assert store.problems() == []
    commit(store, 5)
    ends(store, 0, 1)
    carry_out(store, epoch)
    restore = not_none(head(store).restore)
    assert (restore.step, restore.record_generation) == (5, 2), "what it has saved since counts"
    assert store.problems() == []


def test_a_late_save_of_the_previous_run_is_not_restored_by_a_new_run() -> None:
    """The save's last ack arrives after the job's new start and before the first new world."""
    job = SavingJob()
    job.save(20)
    record = job.begin(step=40, attempt="late")
    for rank in range(record.ranks):
        job.ack(rank, 40, "late")
    job.seal(40, "late")
    for rank in range(record.ranks):
        ends(job.store, rank, 0)
    carry_out(job.store, job.epoch)
    for worker in ("a", "b"):
        leave(job.store, worker)
    anew(job.store, "a", min_workers=1, max_workers=1)
    assert [one.step for one in job.commit()] == [20, 40]
    assert job.store.live.latest() is None
    carry_out(job.store, job.epoch)
    assert (head(job.store).generation, head(job.store).restore) == (2, None)
    assert job.store.problems() == []


def test_resuming_a_running_job_only_joins_it(store: Store) -> None:
    lead(store)
    register(store, "w0", **SPEC)
    resume(store, "w1")
    assert store.job().view.record(JOB.phase, JobPhase) is None
    assert store.job().phase() is Phase.RUNNING
