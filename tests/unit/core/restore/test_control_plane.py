"""A cluster's keys after a loss of etcd: each rule with the case that needs it."""

from __future__ import annotations

import dataclasses

import pytest

from strata.core.checkpoints.attempt import uses
from strata.core.checkpoints.fork import decide_fork, decide_rewind
from strata.core.checkpoints.order import newest, superseded
from strata.core.checkpoints.tiers import present_on
from strata.core.ids import AttemptId, InstanceId
from strata.core.job import JobView
from strata.core.kv.keys import number
from strata.core.kv.records import (
    Anew,
    CheckpointState,
    CheckpointType,
    JobPhase,
    JobSpec,
    Latest,
    Phase,
    TierState,
)
from strata.core.members.membership import decide_register
from strata.core.restore.control_plane import UNSEARCHED_GENERATIONS
from strata.core.restore.storage_evidence import NO_FOLDER, Found
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import ROOT
from tests.unit.core.lost_etcd import WHY, LostJob, at, only_job, records, restored, states
from tests.unit.core.rig import JOB, KEYS, Store, carry_out, lead, register, registration

S3 = "s3://s3"


def goes_on(store: Store, generation: int, step: int | None) -> None:
    """Elect a leader and register a member; assert the next world's generation and restore step."""
    epoch = lead(store)
    register(store, "late", min_workers=1, max_workers=1)
    carry_out(store, epoch, settled=True)
    head = not_none(store.live.head()).record
    assert head.generation == generation, head
    assert (head.restore.step if head.restore is not None else None) == step
    assert store.problems() == []


# -- commits after the backup


def test_a_commit_after_the_backup_is_adopted_and_is_the_latest() -> None:
    job = LostJob(20)
    base = job.base()
    job.save(40, metadata={"lr": "0.1"}, epoch=3)
    result, store = restored(base, job.found())
    record = records(store)[40]
    assert states(store) == {20: "committed", 40: "committed"}
    assert dataclasses.replace(record, reason="") == job.record(40)
    assert only_job(result).changes.adopted == [(40, 1)]
    assert not_none(store.live.latest()).record == not_none(job.store.live.latest()).record
    goes_on(store, 3, 40)


def test_without_a_backup_the_restore_adopts_every_committed_checkpoint_in_storage() -> None:
    job = LostJob(20, 40)
    job.next_world_of_one()
    job.save(60)
    result, store = restored({}, job.found())
    assert states(store) == {20: "committed", 40: "committed", 60: "committed"}
    assert only_job(result).generation == 3
    assert store.live.restored(2) == 40
    assert not store.live.spec()
    assert store.live.exists
    goes_on(store, 4, 60)
    assert not_none(store.live.spec()).record == JobSpec(min_workers=1, max_workers=1)


def test_an_open_save_is_committed_if_marked_and_aborted_otherwise() -> None:
    job = LostJob(20)
    job.begin(step=40, attempt="x40")
    job.begin(step=60, attempt="x60")
    job.ack(0, 60, "x60")
    base = job.base()
    job.ack(0, 40, "x40")
    job.seal(40, "x40")
    job.commit()
    _result, store = restored(base, job.found())
    assert states(store) == {20: "committed", 40: "committed", 60: "aborted"}
    assert records(store)[60].reason == f"{WHY}: this save had not ended"
    assert not store.live.view.names(JOB.acks(60, 1, "x60"))
    goes_on(store, 3, 40)


def test_a_committed_attempt_replaces_the_backups_open_attempt_in_its_slot() -> None:
    job = LostJob(20)
    job.begin(step=40, attempt="x40")
    base = job.base()
    job.abort(step=40, attempt="x40")
    job.begin(step=40, attempt="y40", replaces="x40")
    job.ack(0, 40, "y40")
    job.seal(40, "y40")
    job.commit()
    _result, store = restored(base, job.found())
    assert records(store)[40].attempt == "y40"
    assert store.live.view.names(JOB.discarded) == ["x40"]


def test_a_save_that_an_earlier_restore_gave_up_is_adopted_once_its_root_is_named() -> None:
    job = LostJob(20)
    job.begin(step=40, attempt="x40")
    base = job.base()
    job.ack(0, 40, "x40")
    job.seal(40, "x40")
    job.commit()
    first, _store = restored(base, Found(roots=("file:///elsewhere",)))
    assert only_job(first).changes.not_searched == {ROOT}
    result, store = restored(first.values, job.found())
    assert only_job(result).generation == 2 + UNSEARCHED_GENERATIONS
    assert states(store) == {20: "committed", 40: "committed"}
    goes_on(store, 3 + UNSEARCHED_GENERATIONS, 40)


# -- checkpoints lost from storage


def test_a_checkpoint_removed_after_the_backup_loses_its_record_and_its_keys() -> None:
    job = LostJob(20, 40)
    base = job.base()
    job.save(60)
    job.delete(20)
    job.removed(20)
    result, store = restored(base, job.found())
    assert states(store) == {40: "committed", 60: "committed"}
    assert only_job(result).changes.lost == [(20, 1)]
    assert not [key for key in result.values if key.startswith(f"{JOB.checkpoints}{number(20)}")]


@pytest.mark.parametrize("how", ["pin", "tag"])
def test_a_pinned_or_tagged_checkpoint_without_bytes_stays_as_corrupt(how: str) -> None:
    job = LostJob(20, 40)
    job.pin(20) if how == "pin" else job.tag("paper", 20)
    lost = job.found()
    found = at(lost, checkpoints=tuple(c for c in lost.checkpoints if c.step != 20))
    result, store = restored(job.base(), found)
    assert states(store) == {20: "corrupt", 40: "committed"}
    assert records(store)[20].reason == f"{WHY}: primary: nothing of it is there"
    assert only_job(result).changes.corrupt == [(20, 1)]


def test_a_job_that_lost_every_checkpoint_does_not_begin_from_nothing() -> None:
    job = LostJob(20, 40)
    found = at(job.found(), checkpoints=())
    result, store = restored(job.base(), found)
    assert states(store) == {40: "corrupt"}
    assert not_none(only_job(result).latest).step == 40
    epoch = lead(store)
    register(store, "late", min_workers=1, max_workers=1)
    carry_out(store, epoch, settled=True)
    assert store.live.phase() is Phase.FAILED


def test_a_damaged_checkpoint_is_corrupt_and_its_predecessor_is_the_latest() -> None:
    job = LostJob(20, 40)
    found = job.found()
    path = job.record(40).path
    found = at(found, checkpoints=found.checkpoints[:1], damaged={path: "an image has 3 bytes instead of 5"})
    _result, store = restored(job.base(), found)
    assert states(store) == {20: "committed", 40: "corrupt"}
    assert "3 bytes instead of 5" in records(store)[40].reason
    goes_on(store, 3, 20)


def test_an_unread_checkpoint_stays_as_recorded_with_a_warning() -> None:
    job = LostJob(20, 40)
    found = job.found()
    path = job.record(40).path
    found = at(found, checkpoints=found.checkpoints[:1], unread={path: "permission denied"})
    result, store = restored(job.base(), found)
    assert states(store) == {20: "committed", 40: "committed"}
    assert only_job(result).changes.warnings == [
        "step 40 of generation 1 on primary is kept as recorded: permission denied"
    ]


@pytest.mark.parametrize("why", ["", "its strata.json is no document"])
def test_a_job_whose_folder_was_not_listed_stays_as_it_was_and_is_named_once(why: str) -> None:
    """The job's strata.json is lost or damaged. That proves nothing about the job's checkpoints."""
    job = LostJob(20, 40)
    unread = {f"{ROOT}/job": why} if why else {}
    result, store = restored(job.base(), Found(roots=(ROOT,), unread=unread))
    assert states(store) == {20: "committed", 40: "committed"}
    assert only_job(result).changes.lost == []
    assert only_job(result).changes.warnings == [
        f"{ROOT}/job is not read, so its checkpoints are kept as recorded: {why or NO_FOLDER}"
    ]


def test_a_missing_copy_is_marked_removed_and_the_other_copy_stays() -> None:
    job = LostJob(20)
    job.save_and_copy(40)
    found = job.found(ROOT, S3)
    found = at(found, checkpoints=tuple(c for c in found.checkpoints if c.root == S3 or c.step == 20))
    result, store = restored(job.base(), found)
    tiers = records(store)[40].tiers
    assert {name: tier.state for name, tier in tiers.items()} == {
        "primary": TierState.REMOVED,
        "s3": TierState.PRESENT,
    }
    assert only_job(result).changes.fewer_copies == [(40, 1)]


def test_a_copy_finished_after_the_backup_is_adopted_under_its_tier_name() -> None:
    job = LostJob(20)
    job.copy(20)
    job.save(40)
    base = job.base()
    job.copy(40)
    _result, store = restored(base, job.found(ROOT, S3))
    assert present_on(records(store)[40]) == ["primary", "s3"]


def test_roots_that_were_not_searched_are_named_and_their_copies_stay() -> None:
    job = LostJob(20)
    result, store = restored(job.base(), Found(roots=("file:///other",), generations={"job": 0}))
    assert states(store) == {20: "committed"}
    assert only_job(result).changes.not_searched == {ROOT}


def test_a_commit_in_the_backup_is_kept_even_without_its_marker() -> None:
    job = LostJob(20, 40)
    found = job.found()
    unmarked = dataclasses.replace(found.checkpoints[1], marked=False)
    _result, store = restored(job.base(), at(found, checkpoints=(found.checkpoints[0], unmarked)))
    assert states(store) == {20: "committed", 40: "committed"}
    _result, store = restored({}, at(found, checkpoints=(found.checkpoints[0], unmarked)))
    assert states(store) == {20: "committed"}


def test_a_tombstone_stays_deleting_although_its_bytes_still_exist() -> None:
    job = LostJob(20, 40)
    job.delete(20)
    _result, store = restored(job.base(), job.found())
    assert states(store) == {20: "deleting", 40: "committed"}


def test_another_manifest_than_the_committed_one_is_damage() -> None:
    job = LostJob(20, 40)
    found = job.found()
    other = dataclasses.replace(found.checkpoints[1], manifest_digest="other")
    _result, store = restored(job.base(), at(found, checkpoints=(found.checkpoints[0], other)))
    assert states(store) == {20: "committed", 40: "corrupt"}


# -- incrementals


def test_an_adopted_incremental_keeps_all_that_it_uses() -> None:
    job = LostJob(20)
    base = job.base()
    job.incremental(40, 20)
    job.incremental(60, 40)
    for known in (base, {}):
        _result, store = restored(known, job.found())
        view = store.job()
        user, kept = records(store)[60], [records(store)[step] for step in (20, 40)]
        assert all(uses(view, user, used) for used in kept)
        assert (user.base_step, user.base_attempt) == (40, "x40")


def test_an_incremental_is_adopted_without_the_record_of_its_base() -> None:
    job = LostJob(20)
    job.incremental(40, 20)
    found = job.found()
    _result, store = restored({}, at(found, checkpoints=found.checkpoints[1:]))
    assert states(store) == {40: "committed"}
    goes_on(store, 3, 40)


def test_a_base_without_a_commit_marker_stays_as_corrupt_while_it_is_used() -> None:
    job = LostJob(20)
    job.incremental(40, 20)
    found = job.found()
    _result, store = restored(job.base(), at(found, checkpoints=found.checkpoints[1:]))
    assert states(store) == {20: "corrupt", 40: "committed"}
    assert records(store)[20].tiers["primary"].state is TierState.CORRUPT


def test_a_lost_incremental_takes_back_its_references() -> None:
    job = LostJob(20)
    job.incremental(40, 20)
    job.save(60)
    found = job.found()
    kept = tuple(c for c in found.checkpoints if c.step != 40)
    _result, store = restored(job.base(), at(found, checkpoints=kept))
    assert states(store) == {20: "committed", 60: "committed"}
    assert not store.live.view.names(JOB.refs(20, 1, "x20"))


# -- the newer of two histories


def test_a_rewind_after_the_backup_supersedes_later_checkpoints() -> None:
    job = LostJob(20, 40)
    base = job.base()
    job.store.settle(lambda view: decide_rewind(view, generation=1, step=20))
    job.plan()
    job.save(30)
    for known in (base, {}):
        result, store = restored(known, job.found())
        assert not_none(only_job(result).latest).step == 30
        assert store.live.restored(2) == 20
        assert superseded(store.job(), records(store)[40])
        goes_on(store, 4, 30)


def test_a_job_restarted_from_scratch_after_the_backup_ignores_older_checkpoints() -> None:
    job = LostJob(20, 40)
    base = job.base()
    job.store.put(JOB.anew, Anew(generation=1))
    job.store.delete(JOB.latest)
    job.next_world_of_one()
    job.save(10)
    for known in (base, {}):
        result, store = restored(known, job.found())
        assert not_none(store.live.view.record(JOB.anew, Anew)).generation == 1
        assert not_none(only_job(result).latest).step == 10
        assert all(superseded(store.job(), records(store)[step]) for step in (20, 40))


def test_a_checkpoint_taken_over_by_a_world_stays_its_latest() -> None:
    job = LostJob(20)
    job.next_world_of_one()
    result, store = restored(job.base(), job.found())
    assert not_none(store.live.latest()).record == Latest(
        generation=2, step=20, attempt=AttemptId("x20"), record_generation=1
    )
    assert only_job(result).generation == 3
    goes_on(store, 4, 20)


def test_a_part_of_a_state_is_adopted_and_never_the_latest() -> None:
    job = LostJob(20)
    job.save(40, type=CheckpointType.MODEL_ONLY)
    result, store = restored({}, job.found())
    assert states(store) == {20: "committed", 40: "committed"}
    assert not_none(only_job(result).latest).step == 20


def test_a_generation_that_left_only_a_folder_is_not_reused() -> None:
    job = LostJob(20)
    result, _store = restored(job.base(), at(job.found(), generations={"job": 7}))
    assert only_job(result).generation == 8


# -- a job's other keys


def test_keys_of_processes_are_dropped_and_all_others_stay() -> None:
    job = LostJob(20, 40)
    job.tag("paper", 20)
    job.pin(40)
    job.open(20)
    job.policy(latest=3)
    phase = JobPhase(phase=Phase.PAUSED, reason="lunch", epoch=job.epoch)
    job.store.put(JOB.phase, phase)
    job.store.settle(lambda view: decide_rewind(view, generation=1, step=20))
    result, store = restored(job.base(), job.found())
    left = store.job()
    assert left.workers() == []
    assert left.rewind() is None
    assert not left.view.names(JOB.readers(20, 1, "x20"))
    assert left.phase() is Phase.PAUSED
    assert not_none(left.view.record(JOB.phase, JobPhase)).epoch == 0
    for key in (JOB.tag("paper"), JOB.pin(40, "x40"), JOB.retention, JOB.spec, JOB.history_of(1)):
        assert left.view.get(key) is not None
    head = not_none(left.head()).record
    assert (head.members, head.epoch, head.reason) == (0, 0, f"the control plane was {WHY}")
    assert not [key for key in result.values if not key.startswith(KEYS.jobs)]


def test_a_job_that_never_had_a_world_gets_none() -> None:
    store = Store()
    register(store, "w0", min_workers=2, max_workers=2)
    base = {kv.key: kv.value for kv in store.view().walk("")}
    result, after = restored(base, Found(roots=(ROOT,)))
    assert only_job(result).generation == 0
    assert set(result.values) == {JOB.spec, JOB.run} & set(result.values)
    assert not after.live.head()


def test_a_finished_job_stays_finished() -> None:
    job = LostJob(20)
    phase = JobPhase(phase=Phase.DONE, reason="all ranks are done", epoch=job.epoch)
    job.store.put(JOB.phase, phase)
    _result, store = restored(job.base(), job.found())
    assert store.live.phase() is Phase.DONE


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.FAILED, Phase.PAUSED])
def test_a_job_with_checkpoints_after_the_backup_runs_again(phase: Phase) -> None:
    """The backup's phase is outdated: if it were kept, it would end a training that had continued."""
    job = LostJob(20)
    job.store.put(JOB.phase, JobPhase(phase=phase, reason="all ranks are done", epoch=job.epoch, attempt=3))
    base = job.base()
    job.store.delete(JOB.phase)
    job.next_world_of_one()
    unmarked = at(job.found(), generations={"job": 2})
    _result, store = restored(base, unmarked)
    assert store.live.phase() is phase, "a folder proves no checkpoint"
    job.save(40)
    result, store = restored(base, job.found())
    assert store.live.phase() is Phase.RUNNING
    assert store.live.attempt() == 3
    assert only_job(result).changes.warnings == [
        f"it was {phase.value}, and storage has checkpoints of a later generation: it runs"
    ]
    goes_on(store, 4, 40)


def test_a_fork_that_has_not_begun_keeps_its_source() -> None:
    job = LostJob(20)
    new = KEYS.job("new")
    job.store.settle(lambda v: decide_fork(JobView(v.view, new), JobView(v.view, JOB), step=20))
    result, store = restored(job.base(), job.found())
    assert {each.name: each.generation for each in result.jobs} == {"job": 2, "new": 0}
    fork = JobView(store.view(), new)
    assert not_none(newest(fork)).record.origin is not None
    assert store.live.view.get(JOB.refs(20, 1, "x20") + "fork:new") is not None
    lost = at(job.found(), checkpoints=())
    _result, store = restored(job.base(), lost)
    fork = JobView(store.view(), new)
    assert [e.record.state for e in fork.checkpoints()] == [CheckpointState.CORRUPT]


def test_a_value_that_cannot_be_read_is_left_out_and_named() -> None:
    job = LostJob(20)
    base = job.base() | {
        JOB.retention: b"nonsense",
        JOB.head: b"{}",
        JOB.root + "later": b"of another release",
    }
    result, store = restored(base, job.found())
    assert [w.partition(":")[0] for w in only_job(result).changes.warnings] == [
        f"{JOB.retention} is left out"
    ]
    assert store.live.view.get(JOB.root + "later") is not None
    assert only_job(result).generation == 2


def test_checkpoint_metadata_too_large_for_a_record_is_left_out() -> None:
    job = LostJob(20)
    large = dataclasses.replace(job.found().checkpoints[0], metadata={"m": "x" * 70_000})
    result, store = restored({}, at(job.found(), checkpoints=(large,)))
    assert records(store)[20].metadata == {}
    assert "loses its metadata" in only_job(result).changes.warnings[0]


def test_of_two_marked_attempts_the_recorded_or_else_the_newer_one_is_taken() -> None:
    job = LostJob(20)
    one = job.found().checkpoints[0]
    other = dataclasses.replace(one, attempt=AttemptId("y20"), created_unix_ms=9)
    result, store = restored({}, at(job.found(), checkpoints=(one, other)))
    assert records(store)[20].attempt == "y20"
    assert "two committed attempts" in only_job(result).changes.warnings[0]
    result, store = restored(job.base(), at(job.found(), checkpoints=(one, other)))
    assert records(store)[20].attempt == "x20"


def test_a_restored_generation_is_newer_than_that_of_a_late_member() -> None:
    job = LostJob(20)
    author = job.author(0)
    _result, store = restored(job.base(), job.found())
    old = registration("a", incarnation=author.incarnation, min_workers=1, max_workers=1)
    decision = decide_register(store.job(), old, served_by=InstanceId("i-r1"))
    assert decision.refusal is None, "a reconnect finds no other process in its place"
    leave_generation = not_none(store.live.head()).record.generation
    assert leave_generation > author.generation


def test_the_reference_of_a_world_survives_a_second_restore() -> None:
    job = LostJob(20, 40)
    first, store = restored({}, job.found())
    epoch = lead(store)
    register(store, "w", min_workers=1, max_workers=1)
    carry_out(store, epoch, settled=True)
    base = {kv.key: kv.value for kv in store.view().walk("")}
    second, after = restored(base, job.found())
    assert only_job(second).generation == only_job(first).generation + 2
    assert after.live.restored(3) == 40
    goes_on(after, 5, 40)
