"""Interleavings of PROTOCOLS 8 other than a save's: deletion, reads, Incrementals, copies, corruption reports, rewinds.

Every actor decides on a lagging view, and every write arrives late and in any order. After each transaction
that took effect, the simulation's own rules check the invariants.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from strata.core.checkpoints.copies import CopyRequest, decide_report_copy, next_tier
from strata.core.checkpoints.corruption import DamageReport, decide_report_damage, next_confirmation
from strata.core.checkpoints.deletion import decide_delete
from strata.core.checkpoints.fork import decide_fork, decide_rewind
from strata.core.checkpoints.lifecycle import BeginRequest, decide_begin, decide_pin, decide_unpin, find
from strata.core.checkpoints.paths import folder_name
from strata.core.checkpoints.pins import decide_close_reader, decide_open, decide_tag, decide_untag
from strata.core.checkpoints.references import Keep, Retention
from strata.core.checkpoints.retention_plan import decide_set_retention, next_tombstone
from strata.core.ids import AttemptId
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, CheckpointType
from strata.core.kv.txn import Decision, Txn
from tests.sim.judges.deletions import burial_problems
from tests.unit.core.checkpoint_job import ROOT
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB, KEYS, Observer

LEASE = 9
NEW = KEYS.job("new")


@dataclass
class Race(KeptJob):
    """A job of two members on two hosts, with three Fulls on two tiers, and an Incremental on one."""

    under_way: list[Txn] = field(default_factory=list)
    begun: int = 0

    def __post_init__(self) -> None:
        super().__init__(a=1, b=1)
        self.saves(20, 40, 60)
        self.incremental(80, 60)
        for step in (20, 40, 60):
            self.copy(step)
        self.store.state.leased[LEASE] = set()
        self.observers = [Observer(self.store) for _ in range(3)]

    def arrive(self, index: int) -> None:
        if not self.under_way:
            return
        before = {e.key: e.record for e in self.store.job().checkpoints()}
        self.store.execute(self.under_way.pop(index % len(self.under_way)))
        job = self.store.job()
        for entry in job.checkpoints():
            if before.get(entry.key) != entry.record:
                assert list(burial_problems(job.view, JOB, before.get(entry.key), entry.record)) == []
        after = {e.key for e in job.checkpoints()}
        for key, record in before.items():
            assert key in after or record.state is CheckpointState.DELETING, "it went without a tombstone"
        assert self.store.problems() == []

    def act(self, job: JobView, what: str, index: int) -> None:
        records = [e.record for e in job.checkpoints() if e.record.state is not CheckpointState.OPEN]
        if records:
            decision = self._decide(job, what, records[index % len(records)], index)
            if decision.txn is not None:
                self.under_way.append(decision.txn)

    def _decide(self, job: JobView, what: str, record: CheckpointRecord, index: int) -> Decision:
        step, attempt = record.step, record.attempt
        host = ("host-a", "host-b")[index % 2]
        tier = sorted(record.tiers)[index % len(record.tiers)]
        head = job.head()
        generation = head.record.generation if head is not None else 0
        policy = Retention(keep=Keep(latest=1 + index % 2))
        base = (
            find(job, record.base_step, record.base_attempt or "") if record.base_step is not None else None
        )
        owner = base.record if base is not None else record
        damaged = f"{folder_name(owner.step, owner.generation, owner.attempt)}/rank-00000.safetensors"
        report = DamageReport(step=step, attempt=attempt, host=host, reason="a bit", object=damaged)
        deciders: dict[str, Callable[[], Decision]] = {
            "policy": lambda: decide_set_retention(job, policy),
            "mark": lambda: next_tombstone(job, now_unix_ms=0),
            "delete": lambda: decide_delete(job, step=step, attempt=attempt, finished=False),
            "delete-tier": lambda: decide_delete(job, step=step, attempt=attempt, finished=False, tier=tier),
            "removed": lambda: decide_delete(job, step=step, attempt=attempt, finished=True, tier="primary"),
            "pin": lambda: decide_pin(job, step=step, attempt=attempt, who="me", why=""),
            "unpin": lambda: decide_unpin(job, step=step, attempt=attempt),
            "tag": lambda: decide_tag(job, tag="t", step=step, attempt=attempt, who=""),
            "untag": lambda: decide_untag(job, tag="t"),
            "open": lambda: decide_open(job, step=step, attempt=attempt, reader="r", who="", lease=LEASE),
            "close": lambda: decide_close_reader(job, step=step, attempt=attempt, reader="r"),
            "damage": lambda: decide_report_damage(job, report),
            "refute": lambda: decide_report_damage(job, replace(report, sound=True)),
            "confirm": lambda: next_confirmation(job),
            "tier": lambda: next_tier(job),
            "fork": lambda: decide_fork(JobView(job.view, NEW), job, step=step, attempt=attempt),
            "rewind": lambda: decide_rewind(job, generation=generation, step=step, attempt=attempt),
            "copy": lambda: self._copied(job, record, index),
            "begin": lambda: self._begun(job, record),
        }
        return deciders[what]()

    def _copied(self, job: JobView, record: CheckpointRecord, index: int) -> Decision:
        rank = (0, 1, None)[index % 3]
        digest = "m" if rank is None else f"d{rank}"
        request = CopyRequest(
            step=record.step, attempt=record.attempt, tier="s3", root="s3://b", rank=rank, digest=digest
        )
        return decide_report_copy(job, request)

    def _begun(self, job: JobView, record: CheckpointRecord) -> Decision:
        self.begun += 1
        begin = BeginRequest(
            author=self.author(0),
            step=100 + self.begun,
            type=CheckpointType.INCREMENTAL,
            root=ROOT,
            attempt=AttemptId(f"y{self.begun}"),
            base_step=record.step,
            base_attempt=record.attempt,
        )
        return decide_begin(job, begin, now_unix_ms=0)


NEEDS = ("pin", "tag", "open", "damage", "fork", "rewind", "begin")
REMOVES = ("mark", "delete", "delete-tier")


@pytest.mark.parametrize("needs_first", [True, False])
@pytest.mark.parametrize("removes", REMOVES)
@pytest.mark.parametrize("needs", NEEDS)
def test_concurrent_use_and_removal_of_a_checkpoint_keep_the_invariants(
    needs: str, removes: str, needs_first: bool
) -> None:
    """Two actors decide on the same view. Their writes come in both orders: the later write is refused or harmless.

    A random search meets few of these pairs; this test runs each pair. The needed checkpoint is the removed
    checkpoint (0), or the checkpoint whose existence permits the removal (3).
    """
    for needed in (0, 3):
        race = Race()
        for step in (20, 80):
            race.copy(step)
        race.store.settle(lambda job: decide_set_retention(job, Retention(keep=Keep(latest=1))))
        view = race.store.job()
        race.act(view, needs, needed)
        race.act(view, removes, 0)
        assert len(race.under_way) == 2
        race.arrive(0 if needs_first else len(race.under_way) - 1)
        race.arrive(0)
        race.sound()


WHAT = (
    *("policy", "mark", "mark", "mark", "delete", "delete", "delete-tier", "removed", "removed"),
    *("pin", "unpin", "tag", "untag", "open", "close", "damage", "refute", "confirm", "fork", "rewind"),
    *("copy", "copy", "tier", "delete-tier", "delete-tier", "begin", "begin", "begin", "world"),
)


@pytest.mark.parametrize("seed", range(100))
def test_random_interleavings_never_remove_a_checkpoint_in_use(seed: int) -> None:
    """Acts are drawn evenly, unlike by hypothesis: one seed in ten saves an Incremental on a copy under removal."""
    rng, race = random.Random(seed), Race()
    for _ in range(40):
        observer = race.observers[rng.randrange(3)]
        observer.catch_up(max(observer.view.revision, race.store.revision - rng.randrange(7)))
        head = race.store.job().head()
        if head is None or head.record.forming:
            break  # every checkpoint is corrupt, and the job has failed
        act = rng.choice(WHAT)
        if act == "world":
            race.next_world()
        else:
            race.act(observer.job, act, rng.randrange(6))
        if rng.random() < 0.5:
            race.arrive(rng.randrange(6))
    while race.under_way:
        race.arrive(0)
    race.sound()
