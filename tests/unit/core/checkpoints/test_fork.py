from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from strata.core.checkpoints.fork import decide_fork, decide_rewind, forks_of
from strata.core.checkpoints.lifecycle import BeginRequest, decide_begin
from strata.core.checkpoints.order import newest, pending_rewind, superseded
from strata.core.checkpoints.tiers import ack_of
from strata.core.ids import AttemptId, InstanceId
from strata.core.job import JobView
from strata.core.job_requests import decide_delete as forget
from strata.core.kv.records import (
    Anew,
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    JobPhase,
    JobSpec,
    Phase,
    WorldHead,
)
from strata.core.members.membership import decide_register
from strata.errors import (
    CheckpointNotFound,
    Conflict,
    InvalidArgument,
    Refused,
    StaleGeneration,
    StrataError,
)
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import ROOT
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB, KEYS, Store, carry_out, lead, leave, register, registration

NEW = KEYS.job("new")


@pytest.fixture
def job() -> KeptJob:
    return KeptJob(20, 40, a=2)


def new_job(store: Store) -> JobView:
    return JobView(store.view(), NEW)


def fork(job: KeptJob, *, into: str = "new", source: str = "job", **which: Any) -> None:
    selected = which or {"step": 20}
    fields = {"step": 0, **selected}
    keys = KEYS.job(into)
    job.store.settle(
        lambda v: decide_fork(JobView(v.view, keys), JobView(v.view, KEYS.job(source)), **fields)
    )
    job.sound()


# -- forks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "step"),
    [
        ({"step": 20}, 20),
        ({"step": 20, "attempt": "x20"}, 20),
        ({"tag": "paper"}, 20),
        ({"latest": True}, 40),
    ],
)
def test_a_new_job_begins_from_a_checkpoint_of_another(
    job: KeptJob, which: dict[str, Any], step: int
) -> None:
    job.tag("paper", 20)
    for _ in range(2):
        fork(job, **which)
    record = not_none(newest(new_job(job.store))).record
    assert (record.step, record.generation, record.path) == (step, 0, job.record(step).path)
    assert not_none(ack_of(new_job(job.store), record, 1)).digest == "d1"
    assert forks_of(job.store.job()) == ["new"]


def test_the_source_stays_as_long_as_its_fork(job: KeptJob) -> None:
    fork(job)
    with pytest.raises(Refused, match="referenced by attempt fork:new"):
        job.delete(20)
    job.policy(latest=1)
    assert job.mark() == []
    leave(job.store, "a")
    with pytest.raises(Refused, match="job new was forked"):
        job.store.settle(forget)
    job.store.settle(lambda v: forget(JobView(v.view, NEW)))
    assert not list(job.store.view().walk(NEW.root))
    job.delete(20)


def test_a_fork_of_a_fork_leads_to_the_same_bytes(job: KeptJob) -> None:
    fork(job)
    fork(job, into="third", source="new", step=20)
    third = JobView(job.store.view(), KEYS.job("third"))
    assert not_none(ack_of(third, not_none(newest(third)).record, 0)).digest == "d0"
    assert forks_of(new_job(job.store)) == ["third"]


def test_a_started_job_accepts_no_fork(job: KeptJob) -> None:
    fork(job)
    with pytest.raises(Conflict, match="forked already, from step 20 of job job"):
        fork(job, step=40)
    with pytest.raises(Refused, match="has begun"):
        fork(job, into="job", source="new", step=20)
    with pytest.raises(InvalidArgument):
        fork(job, into="job")


@pytest.mark.parametrize(
    ("which", "error"),
    [
        ({"step": 21}, CheckpointNotFound),
        ({"step": 20, "attempt": "y"}, CheckpointNotFound),
        ({"tag": "none"}, CheckpointNotFound),
        ({"step": 60}, Refused),
        ({"step": 80}, Refused),
    ],
)
def test_only_a_committed_full_checkpoint_can_be_forked(
    job: KeptJob, which: dict[str, Any], error: type[StrataError]
) -> None:
    job.save(60, type=CheckpointType.MODEL_ONLY)
    job.begin(step=80, attempt="x80")
    with pytest.raises(error):
        fork(job, **which)


def forgotten(job: KeptJob) -> None:
    leave(job.store, "a")
    job.store.settle(forget)


@pytest.mark.parametrize(
    "meanwhile",
    [lambda job: job.delete(20), lambda job: fork(job, step=40), forgotten],
    ids=["deleted", "begun", "forgotten"],
)
def test_a_change_between_the_decision_and_the_write_aborts_the_fork(
    job: KeptJob, meanwhile: Callable[[KeptJob], object]
) -> None:
    view = job.store.view()
    txn = not_none(decide_fork(JobView(view, NEW), JobView(view, JOB), step=20).txn)
    meanwhile(job)
    assert not job.store.execute(txn).succeeded


def test_a_concurrent_fork_aborts_the_deletion_of_its_source_job(job: KeptJob) -> None:
    leave(job.store, "a")
    end = not_none(forget(job.store.job()).txn)
    fork(job)
    assert not job.store.execute(end).succeeded


# -- rewinds ----------------------------------------------------------------------------------


def rewind(job: KeptJob, step: int, generation: int | None = None) -> None:
    expected = job.author(0).generation if generation is None else generation
    job.store.settle(lambda v: decide_rewind(v, generation=expected, step=step, who="ada"))
    job.sound()


def generation(job: KeptJob) -> tuple[int, int | None]:
    found = not_none(job.store.job().head())
    restore = found.record.restore
    return found.record.generation, restore.step if restore is not None else None


def test_a_rewind_refuses_saves_until_the_next_generation_restores_its_step(job: KeptJob) -> None:
    rewind(job, 20)
    rewind(job, 20)
    with pytest.raises(Refused, match="goes back to step 20"):
        job.begin(step=60, attempt="x60")
    job.plan()
    assert generation(job) == (2, 20)
    assert job.store.job().rewind() is None
    rewind(job, 20, generation=1)  # a retry, although the first try succeeded
    job.plan()
    assert generation(job) == (2, 20)
    with pytest.raises(StaleGeneration):
        rewind(job, 40, generation=1)


def test_a_crash_after_a_rewind_restores_the_rewound_step_not_the_newest(job: KeptJob) -> None:
    rewind(job, 20)
    job.plan()
    job.another_generation()
    assert generation(job) == (3, 20)
    job.save(30)
    job.another_generation()
    assert generation(job) == (4, 30)


def test_a_crash_before_the_world_is_written_does_not_lose_the_rewind(job: KeptJob) -> None:
    rewind(job, 20)
    leave(job.store, "a")
    job.plan()
    assert job.store.job().rewind() is not None, "a forming world begins nowhere"
    register(job.store, "a", slots=2)
    carry_out(job.store, job.epoch, settled=True)
    assert generation(job)[1] == 20


def test_a_job_can_be_rewound_and_then_moved_forward_again(job: KeptJob) -> None:
    rewind(job, 20)
    job.plan()
    rewind(job, 40)
    job.plan()
    assert generation(job) == (3, 40)
    assert job.store.job().phase() is Phase.RUNNING


def test_a_begun_save_fails_if_a_rewind_is_written_first(job: KeptJob) -> None:
    """The begin's transaction compares the absence of a rewind request, so the later of the two writes fails."""
    request = BeginRequest(
        author=job.author(0), step=60, type=CheckpointType.FULL, root=ROOT, attempt=AttemptId("x60")
    )
    begin = not_none(decide_begin(job.store.job(), request, now_unix_ms=0).txn)
    rewind(job, 20)
    assert not job.store.execute(begin).succeeded


# -- a fork counts as a save ----------------------------------------------------------------------


class Forked(KeptJob):
    """A job of two ranks that begins from a fork of the job `source`, and has a world."""

    def __init__(self) -> None:
        self.store = Store()
        self.epoch = lead(self.store)
        source = KEYS.job("source")
        record = CheckpointRecord(
            attempt=AttemptId("x20"),
            step=20,
            generation=3,
            type=CheckpointType.FULL,
            state=CheckpointState.COMMITTED,
            ranks=2,
            path="file:///data/source/step-20",
            manifest_digest="m",
        )
        self.store.put(source.spec, JobSpec())
        head = WorldHead(generation=3, epoch=self.epoch, members=0, size=0, reason="forming")
        self.store.put(source.head, head)
        self.store.put(source.checkpoint(20, 3), record)
        self.store.settle(lambda v: decide_fork(v, JobView(v.view, source), step=20))
        register(self.store, "a", slots=2, min_workers=1, max_workers=1)
        carry_out(self.store, self.epoch, settled=True)


def test_a_fork_stays_a_restore_point_after_newer_saves() -> None:
    job = Forked()
    assert generation(job) == (1, 20)
    job.save(30)
    assert not superseded(job.store.job(), job.record(20))
    job.damage(30, "host-a")
    assert job.record(30).state is CheckpointState.CORRUPT
    job.another_generation()
    assert generation(job) == (2, 20), "the fork is the one before"


def test_retention_counts_a_fork_and_deletes_it_with_its_reference() -> None:
    job = Forked()
    job.policy(latest=2)
    job.save(30)
    assert job.mark() == []
    job.save(40)
    assert len(job.mark()) == 1
    assert job.steps() == [30, 40]
    source = JobView(job.store.view(), KEYS.job("source"))
    assert forks_of(source) == []


def test_a_job_restarted_from_scratch_abandons_its_fork() -> None:
    job = Forked()
    job.save(30)
    job.store.put(JOB.anew, Anew(generation=1))
    assert superseded(job.store.job(), job.record(20))


# -- the end of a rewind --------------------------------------------------------------------------


def test_a_rewind_to_a_damaged_checkpoint_is_dropped_and_saves_continue(job: KeptJob) -> None:
    rewind(job, 20)
    assert job.damage(20, "host-a").state is CheckpointState.CORRUPT
    job.save(60)
    assert pending_rewind(job.store.job()) is None
    job.plan()
    assert job.store.job().rewind() is None, "the leader clears it away"
    job.save(80)
    job.another_generation()
    assert generation(job) == (2, 80)


def test_a_job_restarted_from_scratch_drops_its_rewind(job: KeptJob) -> None:
    rewind(job, 20)
    job.store.put(JOB.phase, JobPhase(phase=Phase.FAILED, reason="it failed"))
    again = replace(registration("a", slots=2, boot="anew"), anew=True)
    leave(job.store, "a")
    job.store.settle(lambda v: decide_register(v, again, served_by=InstanceId("i-r1")))
    carry_out(job.store, job.epoch, settled=True)
    assert generation(job) == (2, None)
    job.save(10)
