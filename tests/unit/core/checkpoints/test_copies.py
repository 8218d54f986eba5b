from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from strata.core.checkpoints.copies import CopyRequest, decide_report_copy, decide_tier, next_tier
from strata.core.checkpoints.lifecycle import decide_delete, find
from strata.core.checkpoints.maintenance import AdoptRequest, decide_adopt, tasks
from strata.core.checkpoints.order import newest, restore_point
from strata.core.checkpoints.references import Copy
from strata.core.checkpoints.tiers import PRIMARY, hosts_of, tiers_of, within_reach
from strata.core.kv.records import TierState
from strata.errors import CheckpointError, CheckpointNotFound, Conflict, InvalidArgument, Refused
from tests.not_none import not_none
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB, carry_out, leave, register


def report(job: KeptJob, **more: object) -> None:
    fields = {"step": 20, "attempt": "x20", "tier": "s3", "root": "s3://b", "rank": 0, "digest": "d0", **more}
    job.store.settle(lambda v: decide_report_copy(v, CopyRequest(**fields)))  # type: ignore[arg-type]  # named fields


@pytest.fixture
def job() -> KeptJob:
    return KeptJob()


def test_a_tier_is_in_the_record_once_every_part_and_the_seal_are_there() -> None:
    job = KeptJob(20, a=2)
    for fields in ({}, {"rank": None, "digest": "m"}):
        report(job, **fields)
        assert list(job.record(20).tiers) == [PRIMARY]
    for _ in range(2):
        report(job, rank=1, digest="d1")
        tier = job.record(20).tiers["s3"]
        assert tier.path == f"s3://b/job/{job.record(20).path.rpartition('/')[2]}"
        assert tier.shared
    job.sound()


def test_parts_that_come_before_the_commit_count_after_it(job: KeptJob) -> None:
    job.begin(step=20, attempt="x20")
    job.ack(0, 20, "x20")
    report(job)
    job.seal(20, "x20")
    report(job, rank=None, digest="m")
    assert decide_tier(job.store.job(), not_none(find(job.store.job(), 20, "x20")), "s3").txn is None
    job.commit()
    decision = decide_tier(job.store.job(), not_none(find(job.store.job(), 20, "x20")), "s3")
    assert job.store.execute(not_none(decision.txn)).succeeded
    assert "s3" in job.record(20).tiers


def test_the_last_two_parts_through_two_replicas_make_the_tier() -> None:
    """Each replica decides on a view without the other replica's part; the next decision finds both parts."""
    job = KeptJob(20, a=2)
    report(job, rank=None, digest="m")
    old = job.store.job()
    for rank in (0, 1):
        request = CopyRequest(step=20, attempt="x20", tier="s3", root="s3://b", rank=rank, digest=f"d{rank}")
        assert job.store.execute(not_none(decide_report_copy(old, request).txn)).succeeded
    job.copy(20)
    assert "s3" in job.record(20).tiers


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"digest": "other"}, Conflict),
        ({"rank": 5}, Conflict),
        ({"rank": None, "digest": "d0"}, Conflict),
        ({"tier": "a/b"}, InvalidArgument),
        ({"root": "ftp://x"}, InvalidArgument),
        ({"attempt": "y"}, CheckpointNotFound),
        ({"attempt": ""}, CheckpointNotFound),
    ],
)
def test_a_copy_report_that_does_not_match_the_checkpoint_is_refused(
    job: KeptJob, fields: dict[str, object], error: type[Exception]
) -> None:
    job.save(20)
    with pytest.raises(error):
        report(job, **fields)


@pytest.mark.parametrize("state", [TierState.DELETING, TierState.REMOVED, TierState.CORRUPT])
def test_an_incremental_is_not_copied_to_a_tier_that_its_base_leaves(job: KeptJob, state: TierState) -> None:
    """A late removal of the base's bytes on that tier would also remove the base's images that the copy brought.

    For example: an aborted Incremental, adopted after its base left that tier.
    """
    job.save_and_copy(20, 40)
    job.incremental(60, 40)
    job.incremental(80, 60)
    base, where = job.record(40), (60, job.record(60).generation, "x60")
    tiers = {**base.tiers, "s3": replace(base.tiers["s3"], state=state)}
    job.store.put(JOB.checkpoint(40, base.generation), replace(base, tiers=tiers))
    why = f"step 40, which step (60|80) needs, is {state.value} on s3"
    for request in (
        CopyRequest(step=60, attempt="x60", tier="s3", root="s3://b", begun=True),
        CopyRequest(step=80, attempt="x80", tier="s3", root="s3://b", begun=True),
        CopyRequest(step=60, attempt="x60", tier="s3", root="s3://b", rank=0, digest="d0"),
        CopyRequest(step=60, attempt="x60", tier="s3", root="s3://b", digest="m"),
    ):
        with pytest.raises(CheckpointError, match=why):
            job.store.settle(partial(decide_report_copy, request=request))
    # a coordinator older than this rule accepted such a copy
    job.store.put(JOB.copy(*where, "s3", 0), Copy(digest="d0", path="s3://b/x"))
    job.store.put(JOB.copied_seal(*where, "s3"), Copy(digest="m", path="s3://b/x"))
    assert next_tier(job.store.job()).txn is None
    job.sound()


def test_base_chunks_copied_with_an_incremental_are_removed_with_their_base(job: KeptJob) -> None:
    """The base was saved before the second storage existed, so the base itself is never copied there."""
    job.save(20)
    job.incremental(40, 20)
    job.incremental(60, 40)
    for _ in range(2):
        report(job, step=60, attempt="x60", digest="", begun=True)
    job.copy(60)
    job.save(80)
    job.copy(80)
    assert list(job.record(20).tiers) == [PRIMARY], "a part of it is no copy"
    for step in (60, 40, 20):
        job.store.settle(partial(decide_delete, step=step, attempt=f"x{step}", finished=False))
        going = {each.tier: each.path for each in tasks(job.store.job(), "host-a") if each.step == step}
        assert set(going) == {PRIMARY, "s3"}, step
        assert going["s3"].rpartition("/")[2] == going[PRIMARY].rpartition("/")[2]
        for tier in going:
            job.removed(step, tier=tier)
    assert job.steps() == [80]


def test_a_base_can_still_be_copied_during_the_copy_of_its_incremental(job: KeptJob) -> None:
    job.save(20)
    job.incremental(40, 20)
    report(job, step=40, attempt="x40", digest="", begun=True)
    report(job, digest="", begun=True)
    job.copy(20)
    assert job.record(20).tiers["s3"].state is TierState.PRESENT
    job.copy(40)
    assert job.record(40).tiers["s3"].state is TierState.PRESENT


def test_a_deleting_or_removed_tier_never_comes_back(job: KeptJob) -> None:
    job.save_and_copy(20, 40)
    job.delete(20, tier="s3")
    with pytest.raises(Refused, match="s3 is deleting"):
        report(job)
    job.removed(20, tier="s3")
    with pytest.raises(Refused, match="s3 is removed"):
        report(job)
    assert job.record(20).tiers["s3"].state is TierState.REMOVED
    job.delete(20)
    with pytest.raises(Refused, match="is not copied any more"):
        report(job, tier="other")


@pytest.mark.parametrize("part_first", [True, False])
def test_the_last_part_of_a_copy_and_a_deletion_exclude_each_other(part_first: bool) -> None:
    """The tier and the tombstone compare the same record, so the later of the two fails."""
    job = KeptJob(20, 40)
    report(job, rank=None, digest="m")
    request = CopyRequest(step=20, attempt="x20", tier="s3", root="s3://b", rank=0, digest="d0")
    last = not_none(decide_report_copy(job.store.job(), request).txn)
    tombstone = not_none(decide_delete(job.store.job(), step=20, attempt="x20", finished=False).txn)
    both = (last, tombstone) if part_first else (tombstone, last)
    assert [job.store.execute(txn).succeeded for txn in both] == [True, part_first], (
        "a part changes no record"
    )
    tiers = job.record(20).tiers
    assert not part_first or tiers["s3"].state is TierState.DELETING, "its bytes go with the rest"


# -- restore points of a world ----------------------------------------------------------------


def test_a_record_without_tiers_counts_as_on_the_shared_primary_tier(job: KeptJob) -> None:
    record = job.save(20)
    assert list(tiers_of(record)) == [PRIMARY]


def test_a_restore_point_is_on_a_shared_tier_or_on_the_one_host_of_the_world() -> None:
    job = KeptJob(a=2)
    record = job.save(20, tier="disk", shared=False)
    view = job.store.job()
    assert hosts_of(view, record, "disk") == {"host-a"}
    assert within_reach(view, record, {"host-a"})
    assert not within_reach(view, record, {"host-a", "host-b"})
    assert not within_reach(view, record, {"host-b"})
    assert restore_point(view, {"host-b"}) is None
    job.copy(20)
    view = job.store.job()
    assert restore_point(view, {"host-b", "host-c"}) is not None


def test_a_world_restores_the_newest_step_that_survived_the_loss_of_a_host(job: KeptJob) -> None:
    """Step 40 is on host a only; step 20 is also on s3.

    Host b replaces a: the world begins at 20, and the loss is reported.
    """
    for step in (20, 40):
        job.save(step, tier="disk", shared=False)
    job.copy(20)
    leave(job.store, "a")
    register(job.store, "b")
    job.close()
    carry_out(job.store, job.epoch, settled=True)
    head = not_none(job.store.job().head())
    assert head.record.restore is not None
    assert head.record.restore.step == 20
    job.sound()


def test_a_world_waits_while_an_absent_hosts_disk_has_the_only_checkpoint(job: KeptJob) -> None:
    job.save(20, tier="disk", shared=False)
    leave(job.store, "a")
    register(job.store, "b")
    job.close()
    reason = carry_out(job.store, job.epoch, settled=True)
    assert "lies on the disks of other hosts" in reason
    assert not_none(job.store.job().head()).record.forming
    leave(job.store, "b")
    register(job.store, "a")
    carry_out(job.store, job.epoch, settled=True)
    assert not_none(job.store.job().head()).record.restore is not None
    assert newest(job.store.job()) is not None
    job.sound()


def adopted(job: KeptJob) -> None:
    """Let step 20 be aborted, so that only its record is left, then adopted from storage."""
    job.begin(step=20, attempt="x20")
    for rank in range(2):
        job.ack(rank, step=20, attempt="x20")
    job.abort(step=20, attempt="x20")
    job.save(40)
    request = AdoptRequest(step=20, attempt="x20", manifest_digest="m", size_bytes=5)
    job.store.settle(lambda v: decide_adopt(v, request))


def test_an_adopted_checkpoint_without_acks_can_be_copied() -> None:
    job = KeptJob(a=2)
    adopted(job)
    for rank, digest in ((None, "other"), (None, ""), (2, "d2"), (1, "")):
        with pytest.raises(Conflict):
            report(job, rank=rank, digest=digest)
    report(job, rank=0, digest="d0")
    with pytest.raises(Conflict, match="has digest d0, and d1 is reported"):
        report(job, rank=0, digest="d1")  # the manifest names only one of the digests
    for part, named in ((0, "d0"), (1, "d1"), (None, "m")):
        report(job, rank=part, digest=named)
    report(job, rank=0, digest="d0")
    assert set(tiers_of(job.record(20))) == {PRIMARY, "s3"}
    job.sound()


def test_a_copy_report_without_any_ack_is_a_conflict() -> None:
    job = KeptJob(a=2)
    job.begin(step=20, attempt="x20")
    for rank in (None, 0):
        with pytest.raises(Conflict, match="none was acked"):
            report(job, rank=rank, digest="")
