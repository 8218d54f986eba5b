from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from strata.core.ids import AttemptId, WorkerId
from strata.core.kv.records import (
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
from strata.core.members.membership import decide_rank_exit
from strata.core.worlds.planning import MAX_REASON_CHARS, needs_settling
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
            "max_no_progress_generations": limit,
        }
        for index in range(members):
            self.join(f"w{index}")

    def join(self, name: str, *, slots: int = 1) -> None:
        register(self.store, name, slots=slots, **self.spec)

    def go(self, *, settled: bool = False) -> str:
        reason = carry_out(self.store, self.epoch, settled=settled)
        assert self.store.problems() == []
        return reason

    def play(self, story: str) -> str:
        """Play the events of `story` in order; return the reason of the last plan."""
        reason = ""
        for event in story.split(", "):
            match event.split():
                case ["go"]:
                    reason = self.go()
                case ["settle"]:
                    reason = self.go(settled=True)
                case ["join", name]:
                    self.join(name)
                case ["leave", name]:
                    leave(self.store, name)
                case ["exit", rank, code]:
                    ends(self.store, int(rank), int(code))
                case ["commit", step]:
                    commit(self.store, int(step))
                case _:
                    raise ValueError(event)
        return reason


@pytest.fixture
def job() -> Job:
    return Job(2)


# -- the plan after each story ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """`members` members, worlds of two to three, and the expected plan after a story."""

    members: int = 3
    story: str
    says: str
    generation: int
    world: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(group rank, first rank) by worker; empty: a forming world."""
    standbys: tuple[str, ...] = ()
    no_progress: int = 0


ALL_THREE = {"w0": (0, 0), "w1": (1, 1), "w2": (2, 2)}
TWO = {"w0": (0, 0), "w1": (1, 1)}


@pytest.mark.parametrize(
    "row",
    [
        # the first world
        Row(story="go", says="all 3 members are here", generation=1, world=ALL_THREE),
        Row(members=2, story="settle", says="2 members, at least 2, have settled", generation=1, world=TWO),
        Row(story="go, settle", says="generation 1 goes on with 3 members", generation=1, world=ALL_THREE),
        # a member without a place is a standby
        Row(members=4, story="go", says="", generation=1, world=ALL_THREE, standbys=("w3",)),
        Row(
            members=4,
            story="go, join w4, settle",
            says="standbys changed",
            generation=1,
            world=ALL_THREE,
            standbys=("w3", "w4"),
        ),
        Row(
            members=5,
            story="go, leave w3, go",
            says="standbys changed",
            generation=1,
            world=ALL_THREE,
            standbys=("w4",),
        ),
        # deaths
        Row(
            story="go, leave w0, go",
            says="w0 is gone",
            generation=2,
            world={"w1": (1, 1), "w2": (0, 0)},
            no_progress=1,
        ),
        Row(
            story="go, leave w1, join w1, go",
            says="w1 was replaced",
            generation=2,
            world=ALL_THREE,
            no_progress=1,
        ),
        Row(
            members=4,
            story="go, leave w1, go",
            says="w1 is gone",
            generation=2,
            world={"w0": (0, 0), "w3": (1, 1), "w2": (2, 2)},
            no_progress=1,
        ),
        Row(
            story="go, exit 1 -9, go",
            says="rank 1 of w1 failed (killed by signal 9)",
            generation=2,
            world=ALL_THREE,
            no_progress=1,
        ),
        # a forming world and growth: neither counts as a failure or as progress
        Row(
            members=2,
            story="settle, leave w0, go",
            says="1 of at least 2 members are left",
            generation=2,
            no_progress=1,
        ),
        Row(
            members=2,
            story="settle, leave w0, go, settle",
            says="1 of at most 3 members are here; 2 are needed",
            generation=2,
            no_progress=1,
        ),
        Row(members=2, story="settle, leave w0, leave w1, go", says="", generation=2, no_progress=1),
        Row(
            members=2,
            story="settle, leave w0, go, join w0, settle",
            says="have settled",
            generation=3,
            world={"w1": (0, 0), "w0": (1, 1)},
            no_progress=1,
        ),
        Row(
            members=2,
            story="settle, leave w0, go, join w0, settle, join w2, settle",
            says="1 more members have settled",
            generation=4,
            world={"w1": (0, 0), "w0": (1, 1), "w2": (2, 2)},
            no_progress=1,
        ),
        # growth
        Row(members=2, story="settle, join w2, go", says="", generation=1, world=TWO, standbys=("w2",)),
        Row(
            members=2,
            story="settle, join w2, settle",
            says="1 more members have settled",
            generation=2,
            world=ALL_THREE,
        ),
        # a training that has begun to end: no growth, and a finished member's departure ends nothing
        Row(
            members=2,
            story="settle, exit 0 0, join w2, settle",
            says="goes on",
            generation=1,
            world=TWO,
            standbys=("w2",),
        ),
        Row(
            members=2,
            story="settle, exit 0 0, leave w0, settle",
            says="goes on",
            generation=1,
            world=TWO,
        ),
        # a commit is progress; a restored checkpoint is not
        Row(
            story="go, exit 0 1, go, commit 20, exit 0 1, go",
            says="rank 0 of w0 failed",
            generation=3,
            world=ALL_THREE,
        ),
        Row(
            story="go, commit 20, exit 0 1, go, exit 0 1, go",
            says="rank 0 of w0 failed",
            generation=3,
            world=ALL_THREE,
            no_progress=1,
        ),
        Row(
            members=2,
            story="settle, commit 20, leave w0, go, join w0, settle",
            says="have settled",
            generation=3,
            world={"w1": (0, 0), "w0": (1, 1)},
        ),
    ],
    ids=lambda row: f"{row.members}: {row.story}",
)
def test_each_story_leads_to_its_world(row: Row) -> None:
    job = Job(row.members)
    assert row.says in job.play(row.story)
    now = head(job.store)
    assert (now.generation, now.no_progress, now.forming) == (row.generation, row.no_progress, not row.world)
    assert world_of(job.store) == row.world
    assert standbys(job.store) == row.standbys
    before = job.store.revision
    job.go()
    assert job.store.revision == before, "and nothing else follows"


@pytest.mark.parametrize(
    ("members", "story", "waits"),
    [
        (1, "go", False),
        (2, "go", True),
        (3, "go", False),
        (2, "settle, join w2, go", True),
        (2, "settle, join w2, settle", False),
        (2, "settle, leave w0, go, join w0", True),
        (2, "settle, exit 0 0, join w2", False),
    ],
)
def test_planning_reports_whether_only_settling_is_missing(members: int, story: str, waits: bool) -> None:
    job = Job(members)
    job.play(story)
    assert needs_settling(job.store.job(), {}) is waits


def test_a_job_that_does_not_exist_has_no_plan(store: Store, epoch: int) -> None:
    assert plan(store, epoch, settled=True).txns == ()
    assert not needs_settling(store.job(), {})


def test_a_world_with_too_few_members_does_not_start() -> None:
    job = Job(1)
    assert "2 are needed" in job.go(settled=True)
    assert job.store.job().head() is None


def test_many_deaths_are_named_briefly() -> None:
    job = Job(10, least=1, most=10)
    job.go()
    for index in range(9):
        leave(job.store, f"w{index}")
    assert "and 5 more" in job.go()
    assert len(head(job.store).reason) <= MAX_REASON_CHARS


# -- the end ----------------------------------------------------------------------------------


def test_a_job_stays_done_in_its_attempt_once_all_ranks_are_done(job: Job) -> None:
    job.store.put(JOB.phase, JobPhase(phase=Phase.RUNNING, reason="attempt 2 begun by w0", attempt=2))
    job.play("settle, exit 0 0")
    checkpoint(job.store, 40, generation=1, state=CheckpointState.OPEN)
    assert "is done: all 2 ranks are done" in job.play("exit 1 0, go")
    done = not_none(phase(job.store))
    assert (done.phase, done.epoch, done.attempt) == (Phase.DONE, job.epoch, 2)
    assert "is done" in job.play("leave w1, settle")
    assert head(job.store).generation == 1


def test_a_member_that_leaves_before_all_its_ranks_are_done_is_a_death() -> None:
    job = Job(0, least=1, most=2)
    for name in ("w0", "w1"):
        job.join(name, slots=2)
    assert "w0 is gone" in job.play("go, exit 0 0, leave w0, go")
    assert head(job.store).generation == 2


@pytest.mark.parametrize(
    "story",
    [
        "go, exit 0 1, go, exit 2 -11, go",
        "go, exit 0 1, go, commit 20, exit 0 1, go, exit 0 1, go, exit 2 -11, go",
    ],
    ids=["no commit", "fruitless again after a commit"],
)
def test_the_last_unsuccessful_generation_fails_the_job_and_names_why(story: str) -> None:
    job = Job(3, limit=2)
    assert "2 generations in a row" in job.play(story)
    before = head(job.store)
    failed = not_none(phase(job.store))
    assert failed.phase is Phase.FAILED
    assert "rank 2 of w2 failed (killed by signal 11)" in failed.reason
    assert "is failed" in job.go(settled=True)
    assert head(job.store) == before, "no new world"


# -- checkpoints ------------------------------------------------------------------------------


def test_a_new_world_restores_the_latest_checkpoint_and_adopts_its_record() -> None:
    job = Job(3)
    job.go()
    assert (head(job.store).restore, job.store.job().latest()) == (None, None)
    job.play("commit 20, leave w1, go")
    assert head(job.store).restore == RestorePoint(step=20, attempt=AttemptId("a20"), record_generation=1)
    assert job.store.job().restored(2) == 20
    latest = not_none(job.store.job().latest())
    assert (latest.record.generation, latest.record.record_generation) == (2, 1)


def test_a_forming_world_restores_nothing_and_the_following_world_does(job: Job) -> None:
    job.play("settle, commit 20, leave w0, go")
    assert (head(job.store).restore, job.store.job().restored(2)) == (None, None)
    assert not_none(job.store.job().latest()).record.generation == 1
    job.play("join w0, settle")
    assert job.store.job().restored(3) == 20


def test_open_checkpoints_are_settled_before_a_job_fails() -> None:
    job = Job(3, limit=1)
    job.go()
    checkpoint(job.store, 20, generation=1, state=CheckpointState.OPEN)
    checkpoint(job.store, 10, generation=1, state=CheckpointState.ABORTED)
    leave(job.store, "w0")
    planned = plan(job.store, job.epoch)
    assert (planned.txns, [entry.record.step for entry in planned.open_records]) == ((), [20])
    assert "1 open checkpoints first" in planned.reason
    job.play("commit 20, go")
    assert head(job.store).generation == 2, "it was fruitful after all"


# -- fences -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "succeeds"),
    [
        (lambda store: None, True),
        (lambda store: leave(store, "w1"), True),
        (lambda store: lead(store, "r2"), False),
        (lambda store: store.delete(KEYS.leader), False),
        (lambda store: commit(store, 40), False),
        (lambda store: store.put(JOB.phase, JobPhase(phase=Phase.PAUSED, reason="")), False),
        (lambda store: store.put(JOB.head, head(store)), False),
    ],
    ids=["nothing", "a member", "another leader", "no leader", "another latest", "a pause", "another head"],
)
def test_a_concurrent_change_makes_the_plan_fail(change: Callable[[Store], object], succeeds: bool) -> None:
    job = Job(3)
    job.play("go, commit 20, leave w0")
    (txn,) = plan(job.store, job.epoch).txns
    change(job.store)
    assert job.store.execute(txn).succeeded is succeeds


def test_a_paused_job_makes_no_worlds() -> None:
    job = Job(3)
    job.store.put(JOB.phase, JobPhase(phase=Phase.PAUSED, reason="by hand"))
    assert "is paused" in job.go(settled=True)
    assert not needs_settling(job.store.job(), {})


def test_a_phase_is_written_by_the_leader_only(job: Job) -> None:
    job.play("settle, exit 0 0, exit 1 0")
    planned = plan(job.store, job.epoch)
    lead(job.store, "r2")
    assert not job.store.execute(planned.txns[0]).succeeded
    assert phase(job.store) is None
