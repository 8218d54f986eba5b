from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.checkpoint_chores import ChoreKind, chores
from strata.core.checkpoint_damage import (
    DamageReport,
    decide_report_damage,
    doubts,
    is_suspect,
    next_confirmation,
    suspicions,
)
from strata.core.checkpoint_records import Suspect
from strata.core.checkpoints import decide_delete, newest
from strata.core.records import CheckpointState, JobPhase, Origin, Phase, TierState, WorldHead
from strata.errors import CheckpointNotFound, InvalidArgument, Refused
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB, carry_out, leave, plan, register

CORRUPT = CheckpointState.CORRUPT


def head(job: KeptJob) -> WorldHead:
    found = job.store.job().head()
    assert found is not None
    return found.record


def begins_at(job: KeptJob) -> int | None:
    restore = head(job).restore
    return restore.step if restore is not None else None


@pytest.fixture
def job() -> KeptJob:
    """A job on two hosts that began its second generation at step 40."""
    job = KeptJob(a=1, b=1)
    for step in (20, 40):
        job.save(step)
    job.next_world()
    assert begins_at(job) == 40
    return job


def test_one_host_suspects_and_a_second_one_confirms(job: KeptJob) -> None:
    assert job.damage(40, "host-a").state is CheckpointState.COMMITTED
    assert is_suspect(job.store.job(), job.record(40))
    assert job.damage(40, "host-a", reason="again").state is CheckpointState.COMMITTED
    found = job.damage(40, "host-b")
    assert found.state is CORRUPT
    assert "found by host-a, host-b" in found.reason
    job.damage(40, "host-b")


def test_a_second_host_that_reads_what_was_saved_leaves_it_a_suspicion(job: KeptJob) -> None:
    job.damage(40, "host-a")
    assert job.damage(40, "host-b", sound=True).state is CheckpointState.COMMITTED
    assert job.mark() == []
    assert newest(job.store.job()) is not None


def test_alone_where_there_is_no_other_host() -> None:
    job = KeptJob(a=2)
    for step in (20, 40):
        job.save(step)
    assert job.damage(40, "host-a").state is CORRUPT


def test_the_leader_confirms_when_the_second_host_has_gone(job: KeptJob) -> None:
    job.damage(40, "host-a")
    assert job.mark() == []
    leave(job.store, "b")
    assert len(job.mark()) == 1
    assert job.record(40).state is CORRUPT


def test_a_host_that_comes_meanwhile_may_look_first(job: KeptJob) -> None:
    """Alone it was confirmed; somebody came before the transaction: it waits for that one's word."""
    job.damage(40, "host-a")
    leave(job.store, "b")
    report = DamageReport(step=40, attempt="x40", host="host-a", reason="a bit")
    txn = decide_report_damage(job.store.job(), report).txn
    assert txn is not None
    job.store.put(JOB.worker("c"), job.store.job().workers()[0].record)
    assert not job.store.execute(txn).succeeded


def test_a_damaged_copy_leaves_the_checkpoint_its_other_one(job: KeptJob) -> None:
    job.copy(40)
    job.damage(40, "host-a", tier="s3", generation=2)
    found = job.damage(40, "host-b", tier="s3", generation=2)
    assert found.state is CheckpointState.COMMITTED
    assert found.tiers["s3"].state is TierState.CORRUPT
    job.plan()
    assert begins_at(job) == 40
    job.damage(40, "host-a", tier="primary", generation=2)
    assert job.damage(40, "host-b", tier="primary", generation=2).state is CORRUPT


def test_a_host_is_alone_with_what_lies_on_its_own_disk() -> None:
    job = KeptJob(a=1, b=1)
    job.save(20, tier="disk", shared=False)
    assert job.damage(20, "host-a").state is CORRUPT


def test_missing_bytes_of_a_tombstone_are_no_damage(job: KeptJob) -> None:
    job.store.settle(lambda v: decide_delete(v, step=20, attempt="x20", finished=False))
    with pytest.raises(Refused, match="need not be there"):
        job.damage(20)
    job.removed(20)
    with pytest.raises(CheckpointNotFound):
        job.damage(20)
    with pytest.raises(InvalidArgument, match="no copy on s9"):
        job.damage(40, tier="s9")
    with pytest.raises(InvalidArgument):
        job.damage(40, "a/b")


# -- what follows -----------------------------------------------------------------------------


def test_a_generation_that_cannot_begin_is_followed_by_one_that_begins_before(job: KeptJob) -> None:
    for host in ("host-a", "host-b"):
        job.damage(40, host, generation=2)
    reason = plan(job.store, job.epoch).reason
    assert "step 40, where it began, is corrupt" in reason
    job.plan()
    assert (head(job).generation, begins_at(job)) == (3, 20)
    assert head(job).fruitless == 0
    job.plan()
    assert head(job).generation == 3, "20 is what it begins from: no reason to end it again"


def test_a_generation_that_had_read_it_goes_on(job: KeptJob) -> None:
    for host in ("host-a", "host-b"):
        job.damage(40, host)
    job.plan()
    assert head(job).generation == 2
    job.next_world()
    assert begins_at(job) == 20, "the next one begins from the one before"


def test_a_job_whose_every_checkpoint_is_corrupt_fails_and_does_not_begin_from_nothing(job: KeptJob) -> None:
    for step in (20, 40):
        for host in ("host-a", "host-b"):
            job.damage(step, host, generation=2)
    job.plan()
    phase = job.store.job().view.record(JOB.phase, JobPhase)
    assert phase is not None
    assert phase.phase is Phase.FAILED
    assert "no good checkpoint is left" in phase.reason


def test_a_corrupt_one_keeps_its_bytes_until_the_job_has_gone_on_without_it(job: KeptJob) -> None:
    for host in ("host-a", "host-b"):
        job.damage(40, host, generation=2)
    with pytest.raises(Refused, match="is the latest"):
        job.store.settle(lambda v: decide_delete(v, step=40, attempt="x40", finished=False))
    job.plan()
    job.store.settle(lambda v: decide_delete(v, step=40, attempt="x40", finished=False))
    job.sound()


def test_a_world_never_begins_from_nothing_because_all_is_corrupt(job: KeptJob) -> None:
    """Nobody was waiting for the bytes when they were found damaged; then a member dies."""
    for step in (20, 40):
        for host in ("host-a", "host-b"):
            job.damage(step, host)
    leave(job.store, "b")
    register(job.store, "b")
    carry_out(job.store, job.epoch, settled=True)
    phase = job.store.job().view.record(JOB.phase, JobPhase)
    assert phase is not None
    assert (phase.phase, head(job).generation) == (Phase.FAILED, 2)


# -- who must look, and who cannot ----------------------------------------------------------------


def test_a_standby_is_not_waited_for() -> None:
    """It has no process that looks: only hosts with a rank in the world do."""
    job = KeptJob(a=1)
    for step in (20, 40):
        job.save(step)
    register(job.store, "b")
    job.plan()
    assert {worker.record.host for worker in job.store.job().workers()} == {"host-a", "host-b"}
    assert job.damage(40, "host-a").state is CORRUPT


def test_who_comes_into_the_world_meanwhile_is_waited_for() -> None:
    job = KeptJob(a=1)
    job.save(20)
    register(job.store, "b")
    word = Suspect(corrupt=True, reason="a bit")
    record = job.record(20)
    job.store.put(JOB.suspect(20, record.generation, "x20", "primary", "host-a"), word)
    confirm = next_confirmation(job.store.job()).txn
    assert confirm is not None
    job.another_generation()
    assert not job.store.execute(confirm).succeeded


def test_while_a_world_forms_the_next_one_is_waited_for(job: KeptJob) -> None:
    """A member has gone, and a host that never had a rank stands by: it may get one."""
    register(job.store, "c")
    job.damage(40, "host-a")
    leave(job.store, "b")
    assert job.mark() == []


def test_ranks_of_one_host_do_not_take_each_others_word_away(job: KeptJob) -> None:
    job.damage(40, "host-a", generation=2, objects=("f/rank-00000.safetensors",))
    job.damage(40, "host-a", generation=0, objects=("f/rank-00001.safetensors",))
    record = job.record(40)
    (word,) = suspicions(job.store.job(), record, "primary")
    assert word.record.generation == 2
    assert word.record.objects == ("f/rank-00000.safetensors", "f/rank-00001.safetensors")
    job.damage(40, "host-b")
    assert "is corrupt" in plan(job.store, job.epoch).reason


def test_a_generation_whose_word_comes_last_is_ended_too(job: KeptJob) -> None:
    """Two who read it by step had confirmed the damage before the rank that waits for it said so."""
    for host in ("host-a", "host-b"):
        job.damage(40, host)
    assert job.record(40).state is CORRUPT
    job.plan()
    assert head(job).generation == 2
    job.damage(40, "host-a", generation=2)
    job.plan()
    assert (head(job).generation, begins_at(job)) == (3, 20)


def test_a_fork_that_a_rank_finds_damaged_is_looked_at_by_another_host(job: KeptJob) -> None:
    fork = replace(job.record(40), origin=Origin(job="other", step=40, generation=1), generation=0)
    job.store.put(JOB.checkpoint(40, 0), fork)
    job.store.put(JOB.suspect(40, 0, "x40", "primary", "host-a"), Suspect(corrupt=True, reason="a bit"))
    assert [c.kind for c in chores(job.store.job(), "host-b") if c.generation == 0] == [ChoreKind.VERIFY]


def test_a_chore_names_what_was_found_damaged_unless_somebody_does_not_know(job: KeptJob) -> None:
    job.damage(40, "host-a", objects=("f/rank-00001.safetensors",))
    (chore,) = chores(job.store.job(), "host-b")
    assert chore.objects == ("f/rank-00001.safetensors",)
    assert list(chores(job.store.job(), "host-a")) == []
    job.damage(40, "host-a", reason="something")
    (chore,) = chores(job.store.job(), "host-b")
    assert chore.objects == ()


def test_a_word_that_one_image_is_sound_says_nothing_of_the_others(job: KeptJob) -> None:
    one, two = "f/rank-00000.safetensors", "f/rank-00001.safetensors"
    job.damage(40, "host-a", objects=(one,))
    job.damage(40, "host-b", sound=True, objects=(one,))
    assert list(chores(job.store.job(), "host-b")) == []
    job.damage(40, "host-a", objects=(two,))
    (chore,) = chores(job.store.job(), "host-b")
    assert chore.objects == (two,), "it has read the other one"
    job.damage(40, "host-b", sound=True, objects=(two,))
    assert list(chores(job.store.job(), "host-b")) == []
    job.damage(40, "host-a", reason="something")
    (chore,) = chores(job.store.job(), "host-b")
    assert chore.objects == ()
    job.damage(40, "host-b", sound=True)
    job.damage(40, "host-b", sound=True, objects=(one,))
    assert list(chores(job.store.job(), "host-b")) == [], "all of it was read, and one object again"


def test_what_a_host_read_sound_takes_no_damage_away_that_it_found_elsewhere(job: KeptJob) -> None:
    one, two = "f/rank-00000.safetensors", "f/rank-00001.safetensors"
    job.damage(40, "host-a", generation=2, objects=(one,))
    job.damage(40, "host-a", sound=True, objects=(two,))
    (word,) = suspicions(job.store.job(), job.record(40), "primary")
    assert (word.record.corrupt, word.record.objects, word.record.generation) == (True, (one,), 2)
    job.damage(40, "host-a", sound=True, objects=(one,))
    assert not is_suspect(job.store.job(), job.record(40))


def test_a_host_that_cannot_read_says_so_and_has_not_looked(job: KeptJob) -> None:
    one, two = "f/rank-00000.safetensors", "f/rank-00001.safetensors"
    job.damage(40, "host-a", objects=(one,))
    job.damage(40, "host-b", unread=True, sound=True, reason="the disk is away")  # as hosts say it
    (chore,) = chores(job.store.job(), "host-b")
    assert chore.objects == (one,)
    assert list(doubts(job.store.job(), job.record(40))) == [
        "host-a on primary: found damage: a bit",
        "host-b on primary: could not read it: the disk is away",
    ]
    before = job.store.revision
    job.damage(40, "host-b", unread=True, reason="still away, request 2")
    assert job.store.revision == before, "else each try would bring about the next one"
    job.damage(40, "host-b", sound=True, objects=(one,), reason="")
    assert list(doubts(job.store.job(), job.record(40)))[1] == "host-b on primary: found it sound"
    job.damage(40, "host-a", objects=(two,))
    job.damage(40, "host-b", unread=True)
    assert [chore.objects for chore in chores(job.store.job(), "host-b")] == [(two,)]
    job.damage(40, "host-a", unread=True)
    assert is_suspect(job.store.job(), job.record(40)), "it takes no damage away"
    assert job.mark() == []
