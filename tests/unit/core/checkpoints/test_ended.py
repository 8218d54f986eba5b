"""Keys that an aborted attempt leaves, and conditions for the attempts that an Incremental uses."""

from __future__ import annotations

import pytest

from strata.core.checkpoints.lifecycle import BeginRequest, decide_begin, decide_delete
from strata.core.checkpoints.tiers import hosts_of
from strata.core.ids import AttemptId
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import CheckpointAborted, Refused
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import ROOT, Job
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB

# -- acks of an aborted attempt -----------------------------------------------------------------


def test_the_acks_of_an_aborted_attempt_are_deleted() -> None:
    job = Job()
    record = job.begin(attempt="x")
    job.ack(0)
    job.ack(1)
    folder = JOB.acks(20, record.generation, "x")
    assert len(job.store.view().names(folder)) == 2
    job.abort()
    assert job.store.view().names(folder) == []
    with pytest.raises(CheckpointAborted):
        job.ack(0)
    assert job.store.problems() == []


def test_acks_stay_if_only_they_name_the_hosts_of_the_parts() -> None:
    job = Job()
    record = job.begin(tier="disk", shared=False)
    job.ack(0)
    job.ack(2)
    job.abort()
    assert hosts_of(job.store.job(), record, "disk") == {"host-a", "host-b"}
    assert job.store.problems() == []


# -- an Incremental and its base ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "why"),
    [
        ("primary", "step 20, which the base needs, is not on primary any more"),
        ("s3", r"step 20, which the base needs, is (deleting|removed) on s3"),
    ],
)
def test_an_incremental_is_not_begun_on_a_base_that_leaves_a_tier(tier: str, why: str) -> None:
    """The Incremental uses chunks on its base's tiers, so it could never be copied to a tier that the base leaves."""
    job = KeptJob()
    job.save_and_copy(20, 40)
    for finished in (False, True):
        job.delete(20, finished=finished, tier=tier)
        assert job.record(20).state is CheckpointState.COMMITTED
        with pytest.raises(Refused, match=why) as refused:
            job.incremental(60, 20)
        assert refused.value.hint == "save a Full"
    assert job.incremental(60, 40).state is CheckpointState.COMMITTED
    job.copy(60)


@pytest.mark.parametrize("first", ["begin", "mark"])
def test_deleting_a_base_copy_and_beginning_an_incremental_exclude_each_other(first: str) -> None:
    job = KeptJob()
    job.save_and_copy(20, 40)
    request = BeginRequest(
        author=job.author(0),
        step=60,
        type=CheckpointType.INCREMENTAL,
        root=ROOT,
        attempt=AttemptId("x60"),
        base_step=20,
        base_attempt=AttemptId("x20"),
    )
    begin = not_none(decide_begin(job.store.job(), request, now_unix_ms=0).txn)
    mark = not_none(
        decide_delete(job.store.job(), step=20, attempt="x20", finished=False, tier="primary").txn
    )
    order = [begin, mark] if first == "begin" else [mark, begin]
    assert [job.store.execute(txn).succeeded for txn in order] == [True, False]
    job.sound()


def test_an_incremental_is_not_begun_on_a_base_reported_as_corrupt() -> None:
    """If the report is true, the Incremental would be damaged too."""
    job = KeptJob(a=1, b=1)
    job.save_and_copy(20, 40)
    job.incremental(60, 40)
    job.damage(40, tier="s3")
    for base in (40, 60):
        with pytest.raises(
            Refused, match="step 40, which the base needs, was found damaged on s3"
        ) as refused:
            job.incremental(80, base)
        assert refused.value.hint == "save a Full"
    job.incremental(80, 20)
