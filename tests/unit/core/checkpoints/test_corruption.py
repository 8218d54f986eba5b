from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from strata.core.checkpoints.corruption import (
    DamageReport,
    decide_report_damage,
    has_open_report,
    next_confirmation,
    report_texts,
    reports,
)
from strata.core.checkpoints.lifecycle import newest
from strata.core.checkpoints.maintenance import MaintenanceKind, tasks
from strata.core.checkpoints.paths import folder_name
from strata.core.checkpoints.references import CorruptionReport
from strata.core.checkpoints.retention_plan import next_tombstone
from strata.core.kv.records import CheckpointState, JobPhase, Origin, Phase, TierState, WorldHead
from strata.errors import CheckpointNotFound, InvalidArgument, Refused
from tests.not_none import not_none
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB, leave, plan, register

CORRUPT = CheckpointState.CORRUPT

ONE, TWO = "f/rank-00000.safetensors", "f/rank-00001.safetensors"


def head(job: KeptJob) -> WorldHead:
    return not_none(job.store.job().head()).record


def begins_at(job: KeptJob) -> int | None:
    restore = head(job).restore
    return restore.step if restore is not None else None


def reported(job: KeptJob, step: int, *hosts: str, generation: int | None = None, **more: Any) -> None:
    """Write these hosts' corruption reports, as if each host had decided without seeing the others'."""
    where = job.record(step).where if generation is None else (step, generation, f"x{step}")
    for host in hosts:
        report = CorruptionReport(
            **{"corrupt": True, "reason": "a bit", "found_generation": 1, "found_step": step, **more}
        )
        job.store.put(JOB.suspect(*where, "primary", host), report)


@pytest.fixture
def job() -> KeptJob:
    """Return a job on two hosts that began its second generation at step 40."""
    job = KeptJob(20, 40, a=1, b=1)
    job.next_world()
    assert begins_at(job) == 40
    return job


def test_one_host_suspects_and_a_second_one_confirms(job: KeptJob) -> None:
    assert job.damage(40, "host-a").state is CheckpointState.COMMITTED
    assert has_open_report(job.store.job(), job.record(40))
    assert job.damage(40, "host-a", reason="again").state is CheckpointState.COMMITTED
    found = job.damage(40, "host-b")
    assert found.state is CORRUPT
    assert "found by host-a, host-b" in found.reason
    job.damage(40, "host-b")


def test_an_intact_read_by_a_second_host_refutes_the_report(job: KeptJob) -> None:
    job.damage(40, "host-a")
    assert job.damage(40, "host-b", sound=True).state is CheckpointState.COMMITTED
    assert not has_open_report(job.store.job(), job.record(40))
    leave(job.store, "b")
    assert job.mark() == [], "the refutation outlives who made it"
    assert newest(job.store.job()) is not None


def refuted(job: KeptJob) -> None:
    """Let host-a report damage of one object, and host-b read the object as sound."""
    job.damage(40, "host-a", object=ONE)
    job.damage(40, "host-b", sound=True, object=ONE)


def test_a_refuted_host_is_not_believed_again_until_it_has_a_new_worker(job: KeptJob) -> None:
    refuted(job)
    with pytest.raises(Refused, match=f"host-b read {ONE}, which host-a reported of step 40") as refusal:
        job.damage(40, "host-a", object=ONE)
    assert "memory" in refusal.value.hint
    leave(job.store, "a")
    register(job.store, "a")
    job.damage(40, "host-a", object=ONE)
    assert has_open_report(job.store.job(), job.record(40))
    assert [c.object for c in tasks(job.store.job(), "host-b")] == [ONE]


def test_a_report_of_another_object_is_verified_separately(job: KeptJob) -> None:
    """This holds even for a report from a refuted host: a refutation is for one object only."""
    refuted(job)
    job.damage(40, "host-a", object=TWO)
    assert [c.object for c in tasks(job.store.job(), "host-b")] == [TWO]
    job.damage(40, "host-b", sound=True, object=TWO)
    assert job.damage(40, "host-b", object=ONE).state is CheckpointState.COMMITTED
    assert [c.object for c in tasks(job.store.job(), "host-a")] == [ONE]
    assert job.damage(40, "host-a", object=ONE).state is CORRUPT


def test_a_second_host_that_finds_the_refuted_object_damaged_confirms_it(job: KeptJob) -> None:
    refuted(job)
    assert job.damage(40, "host-b", object=ONE).state is CORRUPT


def test_one_sound_read_refutes_no_two_hosts(job: KeptJob) -> None:
    """Both hosts have reported, and the confirming transaction is on its way."""
    reported(job, 40, "host-a", "host-c", object=ONE)
    assert job.damage(40, "host-b", sound=True, object=ONE).state is CORRUPT


def test_reports_of_many_hosts_fit_into_one_confirming_transaction(job: KeptJob) -> None:
    reported(job, 40, *(f"host-{host}" for host in range(200)), object=ONE)
    txn = not_none(next_confirmation(job.store.job()).txn)
    assert len(txn.compares) + len(txn.success) < 100


def test_a_single_report_is_not_confirmed_while_no_host_is_present() -> None:
    """The first host that returns may be able to verify."""
    job = KeptJob(20, a=1, b=1)
    job.damage(20, "host-a")
    for name in ("a", "b"):
        leave(job.store, name)
    assert job.mark() == []
    register(job.store, "b")
    assert job.mark() == []
    assert len(list(tasks(job.store.job(), "host-b"))) == 1


def of_one_host() -> KeptJob:
    return KeptJob(20, 40, a=2)


def on_own_disks() -> KeptJob:
    job = KeptJob(a=1, b=1)
    job.saves(20, 40, tier="disk", shared=False)
    return job


def beside_a_standby() -> KeptJob:
    """Return a job on host-a and a standby on host-b.

    The standby cannot verify: only hosts with a rank in the world can.
    """
    job = KeptJob(20, 40, a=1)
    register(job.store, "b")
    job.plan()
    assert {worker.record.host for worker in job.store.job().workers()} == {"host-a", "host-b"}
    return job


@pytest.mark.parametrize("made", [of_one_host, on_own_disks, beside_a_standby])
def test_the_only_hosts_report_alone_marks_a_checkpoint_corrupt(made: Callable[[], KeptJob]) -> None:
    assert made().damage(40, "host-a").state is CORRUPT


def test_the_leader_confirms_a_report_once_the_second_host_has_left(job: KeptJob) -> None:
    job.damage(40, "host-a")
    assert job.mark() == []
    leave(job.store, "b")
    assert len(job.mark()) == 1
    assert job.record(40).state is CORRUPT


def test_a_host_that_registers_meanwhile_may_verify_first(job: KeptJob) -> None:
    """t1: host-a, alone, decides to confirm its report. t2: c registers. t3: the write fails; c verifies first."""
    job.damage(40, "host-a")
    leave(job.store, "b")
    report = DamageReport(step=40, attempt="x40", host="host-a", reason="a bit")
    txn = not_none(decide_report_damage(job.store.job(), report).txn)
    job.store.put(JOB.worker("c"), job.store.job().workers()[0].record)
    assert not job.store.execute(txn).succeeded


def test_a_checkpoint_with_one_damaged_copy_is_restored_from_the_other(job: KeptJob) -> None:
    job.copy(40)
    job.damage(40, "host-a", tier="s3", generation=2)
    found = job.damage(40, "host-b", tier="s3", generation=2)
    assert found.state is CheckpointState.COMMITTED
    assert found.tiers["s3"].state is TierState.CORRUPT
    job.plan()
    assert begins_at(job) == 40
    job.damage(40, "host-a", tier="primary", generation=2)
    assert job.damage(40, "host-b", tier="primary", generation=2).state is CORRUPT


def test_a_damage_report_about_a_checkpoint_being_deleted_is_refused(job: KeptJob) -> None:
    job.delete(20)
    with pytest.raises(Refused, match="need not be there"):
        job.damage(20)
    job.removed(20)
    with pytest.raises(CheckpointNotFound):
        job.damage(20)
    with pytest.raises(InvalidArgument, match="no copy on s9"):
        job.damage(40, tier="s9")
    with pytest.raises(InvalidArgument):
        job.damage(40, "a/b")


# -- consequences of a confirmed report -------------------------------------------------------


def test_a_generation_with_a_corrupt_restore_point_is_replaced_from_an_earlier_step(job: KeptJob) -> None:
    job.damage_confirmed(40, generation=2)
    reason = plan(job.store, job.epoch).reason
    assert "step 40, where it began, is corrupt" in reason
    job.plan()
    assert (head(job).generation, begins_at(job)) == (3, 20)
    assert head(job).no_progress == 0
    job.plan()
    assert head(job).generation == 3, "20 is what it begins from: no reason to end it again"


@pytest.mark.parametrize("waits", [2, 0])
def test_a_job_with_only_corrupt_checkpoints_fails_and_does_not_start_over(job: KeptJob, waits: int) -> None:
    """Either the generation waits for the damaged bytes (2), or no generation waits and then a member dies (0)."""
    for step in (20, 40):
        job.damage_confirmed(step, generation=waits)
    if not waits:
        leave(job.store, "b")
        register(job.store, "b")
    job.plan()
    phase = not_none(job.store.job().view.record(JOB.phase, JobPhase))
    assert (phase.phase, head(job).generation) == (Phase.FAILED, 2)
    assert "no good checkpoint is left" in phase.reason


def test_a_corrupt_checkpoint_keeps_its_bytes_until_the_job_continues_without_it(job: KeptJob) -> None:
    job.damage_confirmed(40, generation=2)
    with pytest.raises(Refused, match="is the latest"):
        job.delete(40)
    job.plan()
    job.delete(40)
    job.sound()


# -- hosts that must verify, and hosts that cannot ------------------------------------------------


def test_a_confirmation_waits_for_a_host_that_joins_the_world_meanwhile() -> None:
    job = KeptJob(20, a=1)
    register(job.store, "b")
    reported(job, 20, "host-a")
    confirm = not_none(next_confirmation(job.store.job()).txn)
    job.another_generation()
    assert not job.store.execute(confirm).succeeded


def test_a_report_is_not_confirmed_alone_while_a_world_forms(job: KeptJob) -> None:
    """A member has left. A standby host that never had a rank may get a rank, and then verify."""
    register(job.store, "c")
    job.damage(40, "host-a")
    leave(job.store, "b")
    assert job.mark() == []


def test_reports_of_one_host_merge_and_keep_their_generation(job: KeptJob) -> None:
    job.damage(40, "host-a", generation=2, object=ONE)
    job.damage(40, "host-a", generation=0, object=TWO)
    (report,) = reports(job.store.job(), job.record(40), "primary")
    assert (report.record.generation, report.record.object) == (2, ONE)
    job.damage(40, "host-b")
    assert "is corrupt" in plan(job.store, job.epoch).reason


def test_a_generation_that_reports_confirmed_damage_late_is_ended_too(job: KeptJob) -> None:
    """t1: two hosts that read the checkpoint by step confirm the damage. t2: the rank restoring it reports it too.

    Its generation, which has read those bytes, continues until t2.
    """
    job.damage_confirmed(40)
    assert job.record(40).state is CORRUPT
    job.plan()
    assert head(job).generation == 2
    job.damage(40, "host-a", generation=2)
    job.plan()
    assert (head(job).generation, begins_at(job)) == (3, 20)


def test_a_damaged_fork_is_verified_by_another_host(job: KeptJob) -> None:
    fork = replace(job.record(40), origin=Origin(job="other", step=40, generation=1), generation=0)
    job.store.put(JOB.checkpoint(40, 0), fork)
    reported(job, 40, "host-a", generation=0)
    assert [c.kind for c in tasks(job.store.job(), "host-b") if c.generation == 0] == [MaintenanceKind.VERIFY]


def test_another_host_reads_the_object_that_was_reported_once(job: KeptJob) -> None:
    job.damage(40, "host-a", object=ONE)
    (task,) = tasks(job.store.job(), "host-b")
    assert (task.kind, task.object) == (MaintenanceKind.VERIFY, ONE)
    assert list(tasks(job.store.job(), "host-a")) == []
    job.damage(40, "host-b", sound=True, object=ONE)
    assert list(tasks(job.store.job(), "host-b")) == []


def test_a_host_that_cannot_read_reports_it_and_confirms_nothing(job: KeptJob) -> None:
    job.damage(40, "host-a", object=ONE)
    job.damage(40, "host-b", unread=True, reason="the disk is away")
    assert list(report_texts(job.store.job(), job.record(40))) == [
        "host-a on primary: found damage: a bit",
        "host-b on primary: could not read it: the disk is away",
    ]
    before = job.store.revision
    job.damage(40, "host-b", unread=True, reason="still away, request 2")
    assert job.store.revision == before, "else each try would bring about the next one"
    assert [task.object for task in tasks(job.store.job(), "host-b")] == [ONE], "it may be back"
    job.damage(40, "host-a", unread=True)
    assert has_open_report(job.store.job(), job.record(40)), "it takes no damage away"
    job.damage(40, "host-b", sound=True, object=ONE)
    assert next(report_texts(job.store.job(), job.record(40))) == (
        "host-b on primary: found no damage where host-a did: a bit"
    )


# -- what an Incremental needs of its base ------------------------------------------------------


@pytest.fixture
def chain() -> KeptJob:
    """Return a Full of step 40 and Incrementals at 60, 80 and 100, each on the previous one.

    All but the last are copied.
    """
    job = KeptJob(20, 40, a=1, b=1)
    for step in (60, 80, 100):
        job.incremental(step, step - 20)
    for step in (20, 40, 60, 80):
        job.copy(step)
    return job


def in_step(job: KeptJob, step: int) -> str:
    record = job.record(step)
    return f"{folder_name(step, record.generation, record.attempt)}/rank-00000.safetensors"


def test_the_report_lies_at_the_attempt_that_owns_the_object(chain: KeptJob) -> None:
    """The object was read for step 80 and belongs to step 40. Steps 40 to 80 need it; 100 may have its own copy."""
    chain.damage(80, "host-a", object=in_step(chain, 40))
    view = chain.store.job()
    assert [step for step in (20, 40, 60, 80, 100) if has_open_report(view, chain.record(step))] == [
        40,
        60,
        80,
    ]
    (task,) = tasks(view, "host-b")
    assert (task.step, task.object) == (40, in_step(chain, 40))
    assert next(report_texts(view, chain.record(80))).startswith("host-a on primary: found damage")
    chain.damage(40, "host-b", sound=True, object=in_step(chain, 40))
    assert not any(has_open_report(chain.store.job(), chain.record(step)) for step in (40, 60, 80))


def test_every_checkpoint_that_needs_a_damaged_object_is_corrupt_on_that_tier(chain: KeptJob) -> None:
    chain.damage_confirmed(80, object=in_step(chain, 40), generation=1)
    states = {
        step: (chain.record(step).state, chain.record(step).tiers["primary"].state)
        for step in (20, 40, 60, 80, 100)
    }
    good, damaged = (
        (CheckpointState.COMMITTED, TierState.PRESENT),
        (CheckpointState.COMMITTED, TierState.CORRUPT),
    )
    assert states == {20: good, 40: damaged, 60: damaged, 80: damaged, 100: good}
    chain.damage_confirmed(80, tier="s3", object=in_step(chain, 40), generation=1)
    assert chain.steps() == [20, 100]


def test_damage_of_the_base_ends_the_generation_that_restores_an_incremental(chain: KeptJob) -> None:
    chain.next_world()
    assert begins_at(chain) == 100
    chain.damage_confirmed(100, object=in_step(chain, 40), generation=2)
    chain.plan()
    assert (head(chain).generation, begins_at(chain)) == (3, 80), "80 has a copy in s3"
    for tier in ("primary", "s3"):
        chain.damage_confirmed(80, tier=tier, object=in_step(chain, 80), generation=3)
    chain.plan()
    assert (head(chain).generation, begins_at(chain)) == (4, 60)


def test_damage_in_a_corrupt_base_is_reported_for_the_incremental_that_was_read(
    chain: KeptJob,
) -> None:
    chain.damage_confirmed(40, object=in_step(chain, 40))
    assert chain.record(60).tiers["primary"].state is TierState.PRESENT, "it need not have those bytes"
    chain.damage(60, "host-a", object=in_step(chain, 40))
    assert [c.step for c in tasks(chain.store.job(), "host-b")] == [60]
    assert chain.damage(60, "host-b", object=in_step(chain, 40)).tiers["primary"].state is TierState.CORRUPT


def test_a_reported_checkpoint_is_not_deleted_before_the_verdict() -> None:
    job = KeptJob(20, 40, 60, a=1, b=1)
    job.damage(40, "host-a", object=ONE)
    job.policy(latest=1)
    job.mark()
    assert job.steps() == [40, 60]
    job.damage(40, "host-b", sound=True, object=ONE)
    job.mark()
    assert job.steps() == [60]


def test_the_other_copy_of_a_reported_checkpoint_is_not_deleted_either() -> None:
    job = KeptJob(a=1, b=1)
    job.save_and_copy(20, 40, 60)
    job.damage(40, "host-a", object=ONE)
    job.policy(latest=1)
    job.mark()
    assert job.record(40).tiers["s3"].state is TierState.PRESENT
    job.damage(40, "host-b", object=ONE)
    assert job.record(40).state is CheckpointState.COMMITTED


def test_an_incremental_on_a_corrupt_base_satisfies_no_rule_and_is_deletable() -> None:
    """The base was found damaged during the save of step 60, which may or may not use the damaged bytes."""
    job = KeptJob(20, 40, a=1, b=1)
    job.incremental(60, 40)
    job.damage_confirmed(40, object=in_step(job, 40))
    job.policy(latest=1)
    assert job.mark() == []
    assert job.steps() == [20, 60]
    job.save(80)
    job.mark()
    assert job.steps() == [80]


def test_a_sound_read_closes_the_report_of_the_attempt_it_names(chain: KeptJob) -> None:
    """Step 100 has its base's images on the tier before the base itself is copied there."""
    record = chain.record(100)
    report = CorruptionReport(
        corrupt=True, reason="a bit", object=in_step(chain, 40), found_generation=1, found_step=100
    )
    chain.store.put(JOB.suspect(100, record.generation, "x100", "primary", "host-a"), report)
    chain.damage(100, "host-b", sound=True, object=in_step(chain, 40))
    assert not has_open_report(chain.store.job(), chain.record(100))


def test_a_report_on_a_base_stops_deletions_that_rely_on_its_incremental() -> None:
    job = KeptJob(20, 40, a=1, b=1)
    job.incremental(60, 40)
    job.policy(latest=1)
    txn = not_none(next_tombstone(job.store.job(), now_unix_ms=0).txn)
    job.damage(60, "host-a", object=in_step(job, 40))
    assert not job.store.execute(txn).succeeded, "60 was why 20 could go"
