from __future__ import annotations

from collections.abc import Callable

import pytest

from strata.core.checkpoints.fork import decide_rewind
from strata.core.checkpoints.references import Keep, Retention
from strata.core.checkpoints.retention_plan import (
    decide_set_retention,
    next_tombstone,
    pending,
    reasons,
    retention,
)
from strata.core.kv.records import CheckpointState, TierState
from strata.core.kv.txn import Txn
from strata.errors import Conflict, InvalidArgument, Refused, StaleGeneration
from tests.not_none import not_none
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB

GOING = CheckpointState.DELETING


@pytest.fixture
def job() -> KeptJob:
    """Return a job with five commits: 20 to 100."""
    return KeptJob(20, 40, 60, 80, 100)


def tombstone(job: KeptJob) -> Txn:
    return not_none(next_tombstone(job.store.job(), now_unix_ms=0).txn)


def test_only_a_policy_marks_checkpoints_and_only_those_no_rule_keeps(job: KeptJob) -> None:
    assert job.mark() == []
    job.policy(latest=2, every_steps=50)
    assert pending(job.store.job(), now_unix_ms=0) == 2
    marked = job.mark()
    assert marked == [f"step {step} is to be deleted: no rule keeps it" for step in (20, 40)]
    assert job.steps() == [60, 80, 100]
    assert pending(job.store.job(), now_unix_ms=0) == 0
    for step in (20, 40):
        job.removed(step)
    assert job.steps(GOING) == []
    assert job.mark() == []


def test_each_kept_checkpoint_has_its_reason(job: KeptJob) -> None:
    job.policy(latest=1, every_steps=50)
    named = {
        key.split("/")[-2]: why for key, why in reasons(job.store.job(), now_unix_ms=0)["primary"].items()
    }
    assert named == {
        "000000000060": "the first from step 50 on",
        "000000000100": "one of the 1 newest",
    }


def test_a_policy_that_is_set_again_is_not_written_again(job: KeptJob) -> None:
    job.policy(latest=2)
    before = job.store.revision
    job.policy(latest=2)
    assert job.store.revision == before
    with pytest.raises(InvalidArgument):
        job.policy(every_steps=5)
    job.policy()
    assert not_none(retention(job.store.job())).record.keep.everything


def test_a_rank_of_a_generation_that_is_over_sets_no_rules(job: KeptJob) -> None:
    frozen, policy = job.author(0), Retention(keep=Keep(latest=1), who="rank 0")
    late = decide_set_retention(job.store.job(), policy, author=frozen).txn
    job.another_generation()
    assert not job.store.execute(not_none(late)).succeeded, "it decided before its generation was over"
    with pytest.raises(StaleGeneration):
        job.store.settle(lambda v: decide_set_retention(v, policy, author=frozen))
    job.store.settle(lambda v: decide_set_retention(v, policy, author=job.author(0)))
    assert not_none(retention(job.store.job())).record.keep == Keep(latest=1)


def test_a_policy_set_by_a_rank_keeps_the_rules_of_single_tiers(job: KeptJob) -> None:
    job.policy({"s3": Keep(latest=9)}, latest=2)
    policy = Retention(keep=Keep(latest=1), who="rank 0")
    for _ in range(2):
        job.store.settle(lambda v: decide_set_retention(v, policy, author=job.author(0)))
    held = not_none(retention(job.store.job()))
    assert (held.record.keep, held.record.tiers) == (Keep(latest=1), {"s3": Keep(latest=9)})


def test_a_concurrently_changed_policy_is_not_overwritten(job: KeptJob) -> None:
    mine = Retention(keep=Keep(latest=1), who="ada")
    for seen in (0, job.store.job().view.mod_revision(JOB.retention)):
        assert decide_set_retention(job.store.job(), mine, if_revision=seen).txn is not None
    job.policy(latest=2)
    with pytest.raises(Conflict, match="was changed meanwhile"):
        job.store.settle(lambda v: decide_set_retention(v, mine, if_revision=0))
    job.store.settle(
        lambda v: decide_set_retention(v, mine, if_revision=job.store.job().view.mod_revision(JOB.retention))
    )
    assert decide_set_retention(job.store.job(), mine, if_revision=0).txn is None, "asked once more: it holds"


def goes_back(job: KeptJob) -> None:
    generation = job.author(0).generation
    job.store.settle(lambda v: decide_rewind(v, generation=generation, step=20))


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (lambda job: job.pin(20), "is pinned"),
        (lambda job: job.tag("paper", 20), "tagged paper"),
        (lambda job: job.open(20), "being read by r"),
        (lambda job: job.incremental(120, 20), "referenced by attempt x120"),
        (goes_back, "goes back to step 20"),
    ],
)
def test_a_needed_checkpoint_stays_under_any_policy(
    job: KeptJob, need: Callable[[KeptJob], object], words: str
) -> None:
    need(job)
    job.policy(latest=1)
    job.mark()
    assert 20 in job.steps()
    with pytest.raises(Refused, match=words):
        job.delete(20)


def test_age_is_counted_by_the_clock(job: KeptJob) -> None:
    job.policy(latest=1, age_ms=1000)  # all were committed at 7 ms
    assert job.mark(now_unix_ms=1006) == []
    assert len(job.mark(now_unix_ms=1007)) == 4


def test_a_policy_that_changes_meanwhile_stops_the_deletion(job: KeptJob) -> None:
    job.policy(latest=1)
    txn = tombstone(job)
    job.policy()
    assert not job.store.execute(txn).succeeded
    assert job.mark() == []


def test_a_suspected_checkpoint_counts_for_no_rule_and_a_corrupt_one_is_deleted() -> None:
    job = KeptJob(20, 40, 60, 80, a=1, b=1)
    job.damage(60, "host-a")
    job.policy(latest=2)
    job.mark()
    assert job.steps() == [40, 60, 80], "40 and 80 are the two that are verified"
    job.damage(60, "host-b")
    job.mark()
    assert job.steps() == [40, 80]
    assert job.record(60).state is GOING, "80 is newer, and good"


# -- tiers ------------------------------------------------------------------------------------


def test_each_tier_has_its_own_policy_and_the_record_goes_with_its_last_tier(job: KeptJob) -> None:
    for step in (20, 40, 60, 80, 100):
        job.copy(step)
    job.policy(latest=3, tiers={"primary": Keep(latest=1)})
    job.mark()
    assert job.steps() == [60, 80, 100]
    tiers = job.record(60).tiers
    assert (tiers["primary"].state, tiers["s3"].state) == (TierState.DELETING, TierState.PRESENT)
    assert {t.state for t in job.record(20).tiers.values()} == {TierState.DELETING}
    job.removed(60, tier="primary")
    assert job.record(60).tiers["primary"].state is TierState.REMOVED
    job.removed(20, tier="s3")
    job.removed(20, tier="primary")
    with pytest.raises(AssertionError):
        job.record(20)
    job.policy(latest=1)
    job.mark()
    assert job.steps() == [100]
    job.removed(60, tier="s3")
    with pytest.raises(AssertionError):
        job.record(60)


def test_an_unfinished_copy_is_deleted_with_its_record(job: KeptJob) -> None:
    job.copy(20, seal=False)
    assert list(job.record(20).tiers) == ["primary"]
    job.policy(latest=1)
    job.mark()
    assert {n: t.state for n, t in job.record(20).tiers.items()} == {
        "primary": TierState.DELETING,
        "s3": TierState.DELETING,
    }
    job.removed(20, tier="primary")
    assert job.record(20).tiers["primary"].state is TierState.REMOVED
    job.removed(20, tier="s3")
    with pytest.raises(AssertionError):
        job.record(20)


def test_the_newest_copy_on_a_shared_tier_stays_until_a_newer_one_is_copied() -> None:
    job = KeptJob()
    for step in (20, 40):
        job.save(step, tier="disk", shared=False)
    job.copy(20)
    job.policy(latest=1)
    job.mark()
    assert job.steps() == [20, 40]
    assert job.record(20).tiers["disk"].state is TierState.DELETING
    assert job.record(20).tiers["s3"].state is TierState.PRESENT
    with pytest.raises(Refused, match="no newer checkpoint than step 20 is on s3"):
        job.delete(20)
    job.copy(40)
    job.mark()
    assert job.steps() == [40]


def test_a_corruption_report_between_decision_and_mark_stops_the_deletion() -> None:
    """The newest checkpoint permits the deletion of the others.

    If the newest is damaged, no good checkpoint would be left.
    """
    job = KeptJob(20, 40, a=1, b=1)
    job.policy(latest=1)
    txn = tombstone(job)
    job.damage(40, "host-a")
    assert not job.store.execute(txn).succeeded
    assert job.mark() == []
    job.damage(40, "host-b")
    assert job.steps() == [20]
