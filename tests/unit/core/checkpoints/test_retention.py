from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from strata.core.checkpoints.lifecycle import (
    decide_delete,
    decide_unpin,
    find,
    is_latest,
    latest_under,
    newest,
    order,
    restore_point,
    superseded,
    supersedes_any,
)
from strata.core.kv.records import (
    CheckpointState,
    CheckpointType,
    Latest,
    Restored,
    RestorePoint,
)
from strata.errors import CheckpointNotFound, Conflict, InvalidArgument, Refused, StrataError
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import Job
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB


def mark(job: Job, step: int, state: CheckpointState) -> None:
    """Write a record's state directly."""
    found = not_none(find(job.store.job(), step))
    job.store.put(found.key, dataclasses.replace(found.record, state=state))


@pytest.fixture
def job() -> KeptJob:
    """Return a job with three commits: 20, 40, 60."""
    return KeptJob(20, 40, 60)


# -- deletion ---------------------------------------------------------------------------------


def test_a_deletion_marks_then_forgets_and_each_half_may_be_repeated(job: KeptJob) -> None:
    for _ in range(2):
        job.delete(20)
        assert job.record(20).state is CheckpointState.DELETING
    for _ in range(2):
        job.delete(20, finished=True)
    assert not list(job.store.view().walk(JOB.checkpoint_step(20)))


@pytest.mark.parametrize(
    ("which", "error", "words"),
    [
        ({"step": 60}, Refused, "is the latest"),
        ({"step": 20, "finished": True}, Refused, "not deleting"),
        ({"step": 20, "attempt": ""}, InvalidArgument, "must name the attempt"),
        ({"step": 20, "tier": "s4"}, InvalidArgument, "no copy on s4"),
        ({"step": 21}, CheckpointNotFound, "no attempt x21 of step 21"),
    ],
)
def test_a_latest_unmarked_or_unknown_checkpoint_cannot_be_deleted(
    job: KeptJob, which: dict[str, Any], error: type[StrataError], words: str
) -> None:
    with pytest.raises(error, match=words):
        job.delete(**which)


def test_a_pin_belongs_to_one_owner_and_can_be_removed(job: KeptJob) -> None:
    job.pin(20)
    job.pin(20)
    with pytest.raises(Conflict, match="by me: paper"):
        job.pin(20, who="you")
    for _ in range(2):
        job.store.settle(lambda v: decide_unpin(v, step=20, attempt="x20"))
    job.delete(20)


def test_a_checkpoint_without_a_newer_committed_one_is_not_deleted(job: KeptJob) -> None:
    job.save(80, type=CheckpointType.MODEL_ONLY)
    with pytest.raises(Refused, match="no newer checkpoint"):
        job.delete(80)
    for step in (40, 60):
        mark(job, step, CheckpointState.CORRUPT)
    with pytest.raises(Refused, match="no newer checkpoint"):
        job.delete(20)


def test_an_open_save_must_be_aborted_before_it_is_deleted(job: KeptJob) -> None:
    job.begin(step=80, attempt="x80")
    with pytest.raises(Refused, match="abort it first"):
        job.delete(80)
    job.abort(step=80, attempt="x80")
    job.delete(80)
    with pytest.raises(Refused, match="being deleted"):
        job.begin(step=80, attempt="y", replaces="x80")
    job.delete(80, finished=True)
    assert job.begin(step=80, attempt="y").state is CheckpointState.OPEN


def test_deleting_an_incremental_frees_its_base(job: KeptJob) -> None:
    job.incremental(80, 20)
    job.save(100)
    with pytest.raises(Refused, match="referenced"):
        job.delete(20)
    job.delete(80)
    with pytest.raises(Refused, match="referenced"):
        job.delete(20)
    job.delete(80, finished=True)
    job.delete(20)


@pytest.mark.parametrize(
    "late",
    [
        lambda job: job.pin(20),
        lambda job: job.open(20),
        lambda job: job.begin(
            step=80, attempt="y", type=CheckpointType.INCREMENTAL, base_step=20, base_attempt="x20"
        ),
        lambda job: job.save(80),
    ],
    ids=["pin", "reader", "reference", "latest"],
)
def test_a_change_between_decision_and_transaction_stops_the_deletion(
    job: KeptJob, late: Callable[[KeptJob], object]
) -> None:
    txn = not_none(decide_delete(job.store.job(), step=20, attempt="x20", finished=False).txn)
    late(job)
    assert not job.store.execute(txn).succeeded


# -- order ------------------------------------------------------------------------------------


def world_restores(job: Job, generation: int, point: RestorePoint) -> None:
    """Write directly the keys that the head of a restoring world writes."""
    job.store.put(JOB.latest, latest_under(generation, point))
    job.store.put(JOB.restored(generation), Restored(step=point.step))


def test_saves_of_an_ended_history_beyond_the_restored_step_never_count(job: KeptJob) -> None:
    old = not_none(find(job.store.job(), 20))
    point = RestorePoint(step=20, attempt=old.record.attempt, record_generation=old.record.generation)
    generation = old.record.generation + 1
    world_restores(job, generation, point)
    view = job.store.job()
    assert {e.record.step for e in view.checkpoints() if superseded(view, e.record)} == {40, 60}
    assert newest(view) == find(view, 20)
    assert restore_point(view) == point
    assert supersedes_any(view, generation)
    assert not supersedes_any(view, old.record.generation)
    for step in (60, 40):
        for finished in (False, True):
            decision = decide_delete(job.store.job(), step=step, attempt=f"x{step}", finished=finished)
            assert job.store.execute(not_none(decision.txn)).succeeded
    assert not supersedes_any(job.store.job(), generation)


def test_the_newest_checkpoint_skips_corrupt_ones(job: KeptJob) -> None:
    view = job.store.job()
    assert newest(view) == find(view, 60)
    mark(job, 60, CheckpointState.CORRUPT)
    view = job.store.job()
    assert newest(view) == find(view, 40)
    for step in (20, 40):
        mark(job, step, CheckpointState.CORRUPT)
    assert newest(job.store.job()) is None
    assert restore_point(job.store.job()) is None


def test_a_later_generation_is_newer_whatever_its_step() -> None:
    job = Job()
    job.save(60)
    job.save(80)
    job.next_world()
    again = job.save(80, "y")
    first = not_none(find(job.store.job(), 80, "x80"))
    assert order(again) > order(first.record)
    assert newest(job.store.job()) == first, "the world began from it, and step 80 is not beyond step 80"
    third = job.save(100)
    latest = not_none(job.store.job().latest())
    assert is_latest(job.store.job(), third)
    assert not is_latest(job.store.job(), again)
    assert latest.record == Latest(
        generation=third.generation, step=100, attempt=third.attempt, record_generation=third.generation
    )
