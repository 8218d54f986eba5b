"""The rules for marking checkpoints for deletion: for each rule, a history that breaks it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from strata.core.checkpoints.corruption import DamageReport, decide_report_damage
from strata.core.checkpoints.lifecycle import decide_pin
from strata.core.ids import AttemptId
from strata.core.kv.records import CheckpointRecord, CheckpointState, CheckpointType, Latest, TierState
from tests.sim.judges.deletions import burial_problems
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB


def a_job() -> KeptJob:
    """Return a job with commits of steps 20, 40 and 60, all of them on two tiers."""
    job = KeptJob(a=1, b=1)
    job.save_and_copy(20, 40, 60)
    return job


def marked(job: KeptJob, step: int, *tiers: str) -> list[str]:
    """Mark a checkpoint or some copies for deletion, regardless of the rules; return the problems found."""
    old = job.record(step)
    going = {
        name: dataclasses.replace(tier, state=TierState.DELETING) if not tiers or name in tiers else tier
        for name, tier in old.tiers.items()
    }
    new = dataclasses.replace(old, tiers=going, state=old.state if tiers else CheckpointState.DELETING)
    job.store.put(JOB.checkpoint(step, old.generation), new)
    return list(burial_problems(job.store.job().view, JOB, old, new))


def change(job: KeptJob, step: int, **changes: object) -> None:
    record = job.record(step)
    job.store.put(JOB.checkpoint(step, record.generation), dataclasses.replace(record, **changes))  # type: ignore[arg-type]  # named fields


def pin(job: KeptJob) -> None:
    job.store.settle(lambda view: decide_pin(view, step=20, attempt="x20", who="me", why=""))


def report_the_newer(job: KeptJob) -> None:
    for step in (40, 60):
        report = DamageReport(step=step, attempt=f"x{step}", host="host-a", reason="a bit", tier="s3")
        job.store.settle(lambda view, r=report: decide_report_damage(view, r))  # type: ignore[misc]  # a bound loop variable


def leave_s3(job: KeptJob) -> None:
    for step in (40, 60):
        tiers = dict(job.record(step).tiers)
        tiers["s3"] = dataclasses.replace(tiers["s3"], state=TierState.REMOVED)
        change(job, step, tiers=tiers)


def go_back(job: KeptJob) -> None:
    """Make a world restore step 20."""
    job.store.put(JOB.latest, Latest(generation=2, step=20, attempt=AttemptId("x20"), record_generation=1))


def nothing_newer(job: KeptJob) -> None:
    for step in (40, 60):
        change(job, step, state=CheckpointState.CORRUPT)


def only_parts_newer(job: KeptJob) -> None:
    for step in (40, 60):
        change(job, step, type=CheckpointType.MODEL_ONLY)


def incremental(job: KeptJob) -> None:
    job.begin(step=80, attempt="y", type=CheckpointType.INCREMENTAL, base_step=20, base_attempt="x20")


def test_an_unneeded_checkpoint_may_be_deleted() -> None:
    assert marked(a_job(), 20) == []
    assert marked(a_job(), 40, "s3") == []


def test_the_newest_intact_checkpoint_may_not_be_deleted() -> None:
    job = a_job()
    change(job, 60, state=CheckpointState.CORRUPT)
    job.store.put(JOB.latest, Latest(generation=1, step=20, attempt=AttemptId("x20"), record_generation=1))
    assert any("nothing newer" in reported for reported in marked(job, 40))


@pytest.mark.parametrize(
    ("need", "reported"),
    [
        (pin, "is pinned"),
        (lambda job: job.tag("best", 20), "is tagged"),
        (lambda job: job.open(20), "is being read"),
        (incremental, "is referenced"),
        (go_back, "the latest was marked"),
        (nothing_newer, "nothing newer is committed"),
        (only_parts_newer, "nothing newer is committed"),
        (report_the_newer, "undoubted"),
        (leave_s3, "it leaves s3"),
    ],
)
def test_a_needed_checkpoint_may_not_be_deleted(need: Callable[[KeptJob], None], reported: str) -> None:
    job = a_job()
    need(job)
    assert any(reported in each for each in marked(job, 20))


@pytest.mark.parametrize("lost", ["reference", "base", "tier", "committed"])
def test_an_incremental_that_nothing_keeps_is_found(lost: str) -> None:
    job = a_job()
    base = job.record(20)
    incremental(job)
    new: CheckpointRecord = job.record(80, "y")
    assert list(burial_problems(job.store.job().view, JOB, None, new)) == []
    if lost == "reference":
        job.store.delete(JOB.refs(20, base.generation, "x20") + "y")
    elif lost == "base":
        job.store.delete(JOB.checkpoint(20, base.generation))
    elif lost == "tier":
        removed = {n: dataclasses.replace(t, state=TierState.REMOVED) for n, t in base.tiers.items()}
        change(job, 20, tiers=removed)
    else:
        change(job, 20, state=CheckpointState.DELETING)
    assert list(burial_problems(job.store.job().view, JOB, None, new)) != []
