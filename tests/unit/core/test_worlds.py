from __future__ import annotations

import pytest

from strata.core.ids import AttemptId, WorkerId
from strata.core.members import decide_rank_exit
from strata.core.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    JobPhase,
    Latest,
    Phase,
    RestorePoint,
    Standbys,
    WorldHead,
)
from strata.core.worlds import MAX_REASON_CHARS, needs_settling
from tests.not_none import not_none
from tests.unit.core.rig import JOB, KEYS, Store, carry_out, lead, leave, plan, register, world_of


def head(store: Store) -> WorldHead:
    return not_none(store.job().head()).record


def phase(store: Store) -> JobPhase | None:
    return store.job().view.record(JOB.phase, JobPhase)


def standbys(store: Store) -> tuple[str, ...]:
    record = store.job().view.record(JOB.standbys, Standbys)
    return record.workers if record is not None else ()


def ends(store: Store, rank: int, code: int) -> None:
    world = not_none(store.job().world())
    member = world.member_of(rank)
    store.settle(
        lambda job: decide_rank_exit(
            job, WorkerId(member.worker), member.incarnation, world.head.generation, rank, code
        )
    )


def checkpoint(store: Store, step: int, *, generation: int, state: CheckpointState) -> None:
    record = CheckpointRecord(
        attempt=AttemptId(f"a{step}"),
        step=step,
        generation=generation,
        type=CheckpointType.FULL,
        state=state,
        ranks=1,
        path="file:///x",
        manifest_digest="d",
    )
    store.put(JOB.checkpoint(step, generation), record)


def commit(store: Store, step: int) -> None:
    """Commit a checkpoint of the current generation."""
    generation = head(store).generation
    checkpoint(store, step, generation=generation, state=CheckpointState.COMMITTED)
    latest = Latest(
        generation=generation,
        step=step,
        attempt=AttemptId(f"a{step}"),
        record_generation=generation,
    )
    store.put(JOB.latest, latest)


class Job:
    """A job with a leader and members w0, w1 …"""

    def __init__(self, members: int = 0, *, least: int = 2, most: int = 3, limit: int = 3) -> None:
        self.store = Store()
        self.epoch = lead(self.store)
        self.spec = {
            "min_workers": least,
            "max_workers": most,
            "max_fruitless_generations": limit,
        }
        for index in range(members):
            self.join(f"w{index}")

    def join(self, name: str, *, slots: int = 1) -> None:
        register(self.store, name, slots=slots, **self.spec)

    def go(self, *, settled: bool = False) -> str:
        reason = carry_out(self.store, self.epoch, settled=settled)
        assert self.store.problems() == []
        return reason


# -- the first world --------------------------------------------------------------------------


@pytest.fixture
def job() -> Job:
    return Job(2)


def test_a_world_forms_at_max_at_once_and_at_min_after_settling() -> None:
    job = Job(1)
    assert "2 are needed" in job.go(settled=True)
    assert job.store.job().head() is None
    assert not needs_settling(job.store.job(), {})
    job.join("w1")
    assert "settling" in job.go()
    assert needs_settling(job.store.job(), {})
    assert "2 members, at least 2, have settled" in job.go(settled=True)
    assert head(job.store).generation == 1
    assert world_of(job.store) == {"w0": (0, 0), "w1": (1, 1)}

    full = Job(3)
    assert not needs_settling(full.store.job(), {})
    assert "all 3 members are here" in full.go()
    assert head(full.store).size == 3


def test_a_job_that_does_not_exist_has_no_plan(store: Store, epoch: int) -> None:
    assert plan(store, epoch, settled=True).txns == ()
    assert not needs_settling(store.job(), {})


def test_a_world_that_goes_on_writes_nothing() -> None:
    job = Job(3)
    job.go()
    before = job.store.revision
    assert "generation 1 goes on with 3 members" in job.go(settled=True)
    assert job.store.revision == before


def test_who_finds_no_place_stands_by_and_is_listed() -> None:
    job = Job(4)
    job.go()
    assert standbys(job.store) == ("w3",)
    job.join("w4")
    assert "standbys changed" in job.go(settled=True)
    assert standbys(job.store) == ("w3", "w4")
    leave(job.store, "w3")
    job.go()
    assert standbys(job.store) == ("w4",)
    assert head(job.store).generation == 1


# -- deaths -----------------------------------------------------------------------------------


def test_a_death_makes_a_smaller_world_at_once() -> None:
    job = Job(3)
    job.go()
    leave(job.store, "w0")
    assert "w0 is gone" in job.go()
    assert head(job.store).generation == 2
    assert world_of(job.store) == {"w1": (1, 1), "w2": (0, 0)}
    assert head(job.store).fruitless == 1


def test_a_replaced_member_is_a_death_and_its_replacement_a_newcomer() -> None:
    job = Job(3)
    job.go()
    leave(job.store, "w1")
    job.join("w1")
    assert "w1 was replaced" in job.go()
    assert world_of(job.store) == {"w0": (0, 0), "w1": (1, 1), "w2": (2, 2)}


def test_a_standby_takes_the_place_of_the_dead_at_once() -> None:
    job = Job(4)
    job.go()
    leave(job.store, "w1")
    job.go()
    assert world_of(job.store) == {"w0": (0, 0), "w3": (1, 1), "w2": (2, 2)}
    assert standbys(job.store) == ()


def test_a_failed_rank_ends_the_generation_and_its_member_goes_on() -> None:
    job = Job(3)
    job.go()
    ends(job.store, 1, -9)
    assert "rank 1 of w1 failed (killed by signal 9)" in job.go()
    assert head(job.store).generation == 2
    assert len(world_of(job.store)) == 3


def test_many_deaths_are_named_briefly() -> None:
    job = Job(10, least=1, most=10)
    job.go()
    for index in range(9):
        leave(job.store, f"w{index}")
    assert "and 5 more" in job.go()
    assert len(head(job.store).reason) <= MAX_REASON_CHARS


# -- forming ----------------------------------------------------------------------------------


def test_below_min_a_forming_world_is_written_at_once(job: Job) -> None:
    job.go(settled=True)
    leave(job.store, "w0")
    assert "1 of at least 2 members are left" in job.go()
    forming = head(job.store)
    assert (forming.generation, forming.forming, forming.size) == (2, True, 0)
    assert forming.restore is None
    before = job.store.revision
    job.go(settled=True)
    assert job.store.revision == before, "one forming world is enough"
    job.join("w0")
    assert needs_settling(job.store.job(), {})
    job.go()
    assert head(job.store).generation == 2
    job.go(settled=True)
    assert (head(job.store).generation, head(job.store).members) == (3, 2)


def test_a_forming_world_does_not_count_as_fruitless(job: Job) -> None:
    job.go(settled=True)
    leave(job.store, "w0")
    job.go()
    assert head(job.store).fruitless == 1
    job.join("w0")
    job.go(settled=True)
    assert head(job.store).fruitless == 1
    job.join("w2")
    job.go(settled=True)
    assert (head(job.store).generation, head(job.store).fruitless) == (4, 1), "growth neither"


def test_nothing_that_is_left_still_ends_the_generation(job: Job) -> None:
    job.go(settled=True)
    leave(job.store, "w0")
    leave(job.store, "w1")
    job.go()
    assert head(job.store).forming


# -- growth -----------------------------------------------------------------------------------


def test_growth_waits_for_the_settling_and_keeps_the_ranks(job: Job) -> None:
    job.go(settled=True)
    job.join("w2")
    job.go()
    assert head(job.store).generation == 1
    assert standbys(job.store) == ("w2",)
    assert needs_settling(job.store.job(), {})
    assert "1 more members have settled" in job.go(settled=True)
    assert world_of(job.store) == {"w0": (0, 0), "w1": (1, 1), "w2": (2, 2)}
    assert standbys(job.store) == ()
    assert not needs_settling(job.store.job(), {})


def test_a_finishing_generation_does_not_grow(job: Job) -> None:
    job.go(settled=True)
    ends(job.store, 0, 0)
    job.join("w2")
    assert not needs_settling(job.store.job(), {})
    assert "goes on" in job.go(settled=True)


# -- the end ----------------------------------------------------------------------------------


def test_the_end_of_a_job_keeps_the_attempt_that_it_ended_in(job: Job) -> None:
    job.store.put(JOB.phase, JobPhase(phase=Phase.RUNNING, reason="attempt 2 begun by w0", attempt=2))
    job.go(settled=True)
    for rank in (0, 1):
        ends(job.store, rank, 0)
    job.go()
    done = not_none(phase(job.store))
    assert (done.phase, done.attempt) == (Phase.DONE, 2)


def test_all_ranks_done_is_done_for_good(job: Job) -> None:
    job.go(settled=True)
    ends(job.store, 0, 0)
    leave(job.store, "w0")
    assert "goes on" in job.go(settled=True), "a finished member's leave ends nothing"
    ends(job.store, 1, 0)
    assert "is done: all 2 ranks are done" in job.go()
    done = not_none(phase(job.store))
    assert (done.phase, done.epoch) == (Phase.DONE, job.epoch)
    leave(job.store, "w1")
    assert "is done" in job.go(settled=True)
    assert head(job.store).generation == 1


def test_a_member_that_leaves_before_all_its_ranks_are_done_is_a_death() -> None:
    job = Job(0, least=1, most=2)
    job.join("w0", slots=2)
    job.join("w1", slots=2)
    job.go()
    ends(job.store, 0, 0)
    leave(job.store, "w0")
    assert "w0 is gone" in job.go()
    assert head(job.store).generation == 2


def test_the_last_fruitless_generation_fails_the_job_and_names_why() -> None:
    job = Job(3, limit=2)
    job.go()
    ends(job.store, 0, 1)
    job.go()
    assert (head(job.store).generation, head(job.store).fruitless) == (2, 1)
    ends(job.store, 2, -11)
    reason = job.go()
    assert "2 generations in a row" in reason
    failed = not_none(phase(job.store))
    assert failed.phase is Phase.FAILED
    assert "rank 2 of w2 failed (killed by signal 11)" in failed.reason
    assert head(job.store).generation == 2, "no new world"
    assert "is failed" in job.go(settled=True)


def test_a_commit_makes_a_generation_fruitful() -> None:
    job = Job(3, limit=2)
    job.go()
    ends(job.store, 0, 1)
    job.go()
    commit(job.store, 20)
    ends(job.store, 0, 1)
    job.go()
    assert (head(job.store).generation, head(job.store).fruitless) == (3, 0)
    ends(job.store, 0, 1)
    job.go()
    assert head(job.store).fruitless == 1, "what it restored is not a commit of its own"
    ends(job.store, 0, 1)
    assert "2 generations in a row" in job.go()


def test_an_all_done_world_is_done_although_a_commit_is_open(job: Job) -> None:
    job.go(settled=True)
    checkpoint(job.store, 40, generation=1, state=CheckpointState.OPEN)
    ends(job.store, 0, 0)
    ends(job.store, 1, 0)
    assert "is done" in job.go()


# -- checkpoints ------------------------------------------------------------------------------


def test_a_world_restores_latest_and_takes_it_over() -> None:
    job = Job(3)
    job.go()
    assert head(job.store).restore is None
    assert job.store.job().latest() is None
    commit(job.store, 20)
    leave(job.store, "w1")
    job.go()
    assert head(job.store).restore == RestorePoint(step=20, attempt=AttemptId("a20"), record_generation=1)
    assert job.store.job().restored(2) == 20
    latest = not_none(job.store.job().latest())
    assert (latest.record.generation, latest.record.record_generation) == (2, 1)


def test_a_forming_world_restores_nothing_and_the_next_one_does(job: Job) -> None:
    job.go(settled=True)
    commit(job.store, 20)
    leave(job.store, "w0")
    job.go()
    assert job.store.job().restored(2) is None
    assert not_none(job.store.job().latest()).record.generation == 1
    job.join("w0")
    job.go(settled=True)
    assert job.store.job().restored(3) == 20
    assert head(job.store).fruitless == 0


def test_open_checkpoints_come_first() -> None:
    job = Job(3, limit=1)
    job.go()
    checkpoint(job.store, 20, generation=1, state=CheckpointState.OPEN)
    checkpoint(job.store, 10, generation=1, state=CheckpointState.ABORTED)
    leave(job.store, "w0")
    planned = plan(job.store, job.epoch)
    assert planned.txns == ()
    assert [entry.record.step for entry in planned.open_records] == [20]
    assert "1 open checkpoints first" in planned.reason
    commit(job.store, 20)
    job.go()
    assert head(job.store).generation == 2, "it was fruitful after all"


# -- fences -----------------------------------------------------------------------------------


def test_what_changes_in_between_makes_the_plan_fail() -> None:
    def stale(change: object) -> bool:
        job = Job(3)
        job.go()
        commit(job.store, 20)
        leave(job.store, "w0")
        planned = plan(job.store, job.epoch)
        assert len(planned.txns) == 1
        assert callable(change)
        change(job.store)
        return job.store.execute(planned.txns[0]).succeeded

    assert stale(lambda store: None)
    assert not stale(lambda store: lead(store, "r2")), "another leader"
    assert not stale(lambda store: store.delete(KEYS.leader)), "no leader"
    assert not stale(lambda store: commit(store, 40)), "another latest"
    assert not stale(lambda store: store.put(JOB.phase, JobPhase(phase=Phase.PAUSED, reason="")))
    assert not stale(lambda store: store.put(JOB.head, head(store))), "another head"
    assert stale(lambda store: leave(store, "w1")), "nothing of the members is compared"


def test_a_paused_job_makes_no_worlds() -> None:
    job = Job(3)
    job.store.put(JOB.phase, JobPhase(phase=Phase.PAUSED, reason="by hand"))
    assert "is paused" in job.go(settled=True)
    assert not needs_settling(job.store.job(), {})


def test_a_phase_is_written_by_the_leader_only(job: Job) -> None:
    job.go(settled=True)
    ends(job.store, 0, 0)
    ends(job.store, 1, 0)
    planned = plan(job.store, job.epoch)
    lead(job.store, "r2")
    assert not job.store.execute(planned.txns[0]).succeeded
    assert phase(job.store) is None
