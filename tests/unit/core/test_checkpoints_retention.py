from __future__ import annotations

import dataclasses

import pytest

from strata.core.checkpoints import (
    decide_delete,
    decide_pin,
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
from strata.core.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    Latest,
    Pin,
    Restored,
    RestorePoint,
)
from strata.errors import CheckpointNotFound, Conflict, InvalidArgument, Refused
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import Job
from tests.unit.core.rig import JOB


def delete(job: Job, step: int, *, attempt: str = "", finished: bool = False) -> CheckpointRecord | None:
    attempt = attempt or f"x{step}"
    job.store.settle(lambda v: decide_delete(v, step=step, attempt=attempt, finished=finished))
    assert job.store.problems() == []
    found = find(job.store.job(), step, attempt)
    return found.record if found is not None else None


def pin(job: Job, step: int, *, who: str = "me", attempt: str = "") -> None:
    job.store.settle(lambda v: decide_pin(v, step=step, attempt=attempt or f"x{step}", who=who, why="paper"))


def mark(job: Job, step: int, state: CheckpointState) -> None:
    """Let a record be in a state by hand."""
    found = not_none(find(job.store.job(), step))
    job.store.put(found.key, dataclasses.replace(found.record, state=state))


@pytest.fixture
def job() -> Job:
    """A job with three commits: 20, 40, 60."""
    job = Job(a=1)
    job.saves(20, 40, 60)
    return job


# -- deletion ---------------------------------------------------------------------------------


def test_a_deletion_marks_then_forgets_and_each_half_may_be_repeated(job: Job) -> None:
    for _ in range(2):
        assert not_none(delete(job, 20)).state is CheckpointState.DELETING
    for _ in range(2):
        assert delete(job, 20, finished=True) is None
    assert not list(job.store.view().walk(JOB.checkpoint_step(20)))
    with pytest.raises(CheckpointNotFound):
        delete(job, 20)


def test_the_latest_stays(job: Job) -> None:
    with pytest.raises(Refused, match="is the latest"):
        delete(job, 60)


def test_a_pinned_one_stays_until_it_is_unpinned(job: Job) -> None:
    pin(job, 20)
    pin(job, 20)
    with pytest.raises(Conflict, match="by me: paper"):
        pin(job, 20, who="you")
    with pytest.raises(Refused, match="pinned"):
        delete(job, 20)
    for _ in range(2):
        job.store.settle(lambda v: decide_unpin(v, step=20, attempt="x20"))
    assert delete(job, 20) is not None


def test_a_reader_a_reference_and_an_import_each_keep_it(job: Job) -> None:
    generation = not_none(find(job.store.job(), 20)).record.generation
    for key, words in (
        (JOB.reader(20, generation, "x20", "eval"), "being read by eval"),
        (JOB.refs(20, generation, "x20") + "x80", "referenced by attempt x80"),
        (JOB.importing, "reconciliation"),
    ):
        job.store.put(key, Pin(who="w", why=""))
        with pytest.raises(Refused, match=words):
            delete(job, 20)
        job.store.delete(key)
    assert delete(job, 20) is not None


def test_nothing_goes_without_a_newer_commit(job: Job) -> None:
    job.save(80, type=CheckpointType.MODEL_ONLY)
    with pytest.raises(Refused, match="no newer checkpoint"):
        delete(job, 80)
    for step in (40, 60):
        mark(job, step, CheckpointState.CORRUPT)
    with pytest.raises(Refused, match="no newer checkpoint"):
        job.store.settle(lambda v: decide_delete(v, step=20, attempt="x20", finished=False))


def test_an_open_save_is_aborted_first_and_an_aborted_one_may_go(job: Job) -> None:
    job.begin(step=80, attempt="x80")
    with pytest.raises(Refused, match="abort it first"):
        delete(job, 80)
    job.abort(step=80, attempt="x80")
    assert delete(job, 80) is not None
    with pytest.raises(Refused, match="being deleted"):
        job.begin(step=80, attempt="y", replaces="x80")
    assert delete(job, 80, finished=True) is None
    assert job.begin(step=80, attempt="y").state is CheckpointState.OPEN


def test_a_corrupt_one_goes_once_there_is_a_newer_good_one(job: Job) -> None:
    mark(job, 40, CheckpointState.CORRUPT)
    assert delete(job, 40) is not None


def test_bytes_are_removed_only_after_the_mark(job: Job) -> None:
    with pytest.raises(Refused, match="not deleting"):
        delete(job, 20, finished=True)
    with pytest.raises(InvalidArgument):
        job.store.settle(lambda v: decide_delete(v, step=20, attempt="", finished=False))


def test_what_is_being_deleted_takes_no_pin_and_no_incremental(job: Job) -> None:
    delete(job, 20)
    with pytest.raises(Refused, match="deleting"):
        pin(job, 20)
    with pytest.raises(Refused, match="deleting"):
        job.begin(step=80, attempt="y", type=CheckpointType.INCREMENTAL, base_step=20, base_attempt="x20")
    with pytest.raises(CheckpointNotFound):
        pin(job, 21)


def test_the_end_of_an_incremental_frees_what_it_used(job: Job) -> None:
    job.save(80, type=CheckpointType.INCREMENTAL, base_step=20, base_attempt="x20")
    job.save(100)
    with pytest.raises(Refused, match="referenced"):
        delete(job, 20)
    delete(job, 80)
    with pytest.raises(Refused, match="referenced"):
        delete(job, 20)
    delete(job, 80, finished=True)
    assert delete(job, 20) is not None


@pytest.mark.parametrize("late", ["pin", "reader", "reference", "import", "latest"])
def test_what_comes_between_the_decision_and_its_transaction_stops_it(job: Job, late: str) -> None:
    decision = decide_delete(job.store.job(), step=20, attempt="x20", finished=False)
    assert decision.txn is not None
    generation = job.author(0).generation
    if late == "latest":
        job.save(80)
    elif late == "pin":
        pin(job, 20)
    else:
        key = {
            "reader": JOB.reader(20, generation, "x20", "r"),
            "reference": JOB.refs(20, generation, "x20") + "y",
            "import": JOB.importing,
        }[late]
        job.store.put(key, Pin(who="", why=""))
    assert not job.store.execute(decision.txn).succeeded


# -- order ------------------------------------------------------------------------------------


def world_restores(job: Job, generation: int, point: RestorePoint) -> None:
    """Write what the head of a world that restores writes, by hand."""
    job.store.put(JOB.latest, latest_under(generation, point))
    job.store.put(JOB.restored(generation), Restored(step=point.step))


def test_what_an_ended_history_saved_beyond_the_restored_step_never_counts(job: Job) -> None:
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


def test_the_newest_is_the_latest_or_the_best_of_the_others_when_that_is_corrupt(job: Job) -> None:
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
