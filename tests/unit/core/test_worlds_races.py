"""Leaders that come and go, planning on old views, interleaved at every transaction."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.core import chunks
from strata.core.ids import AttemptId, WorkerId
from strata.core.members import decide_rank_exit
from strata.core.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    Latest,
    Phase,
    WorldHead,
    decode,
    encode,
)
from strata.core.txn import Put, Txn, unchanged
from strata.core.worlds import plan_world
from tests.unit.core.rig import JOB, KEYS, Observer, Store, lead, leave, register

NAMES = [f"w{index}" for index in range(7)]


@dataclass
class Leader:
    """One term in office, whether it knows of its end or not."""

    observer: Observer
    epoch: int
    under_way: list[Txn] = field(default_factory=list)
    """Planned and sent, or lost on the way and still to arrive."""


class Race:
    """The store, its leaders so far, and what may happen to them."""

    def __init__(self) -> None:
        self.store = Store()
        self.leaders: list[Leader] = []
        self.elect()
        self.heads: list[WorldHead] = []
        self.planned: dict[tuple[int, int], list[tuple[str, ...]]] = {}

    def elect(self) -> None:
        epoch = lead(self.store, f"r{len(self.leaders)}")
        self.leaders.append(Leader(Observer(self.store), epoch))

    def toggle(self, name: str) -> None:
        if self.store.job().worker(name) is None:
            spec = {"min_workers": 2, "max_workers": 5, "max_fruitless_generations": 3}
            if self.store.job().phase() is Phase.RUNNING:
                register(self.store, name, slots=1 + int(name[1:]) % 3, **spec)
        else:
            leave(self.store, name)

    def end_rank(self, rank: int, code: int) -> None:
        world = self.store.job().world()
        if world is None or rank >= world.head.size:
            return
        member = world.member_of(rank)
        decision = decide_rank_exit(
            self.store.job(),
            WorkerId(member.worker),
            member.incarnation,
            world.head.generation,
            rank,
            code,
        )
        if decision.txn is not None:
            self.store.execute(decision.txn)

    def commit(self, step: int) -> None:
        """Commit a checkpoint as PROTOCOLS 8.3 has it, cut short: begun and complete at once."""
        head = self.store.job().head()
        if head is None or head.record.forming:
            return
        generation, attempt = head.record.generation, AttemptId(f"a{self.store.revision}")
        key = JOB.checkpoint(step, generation)
        if self.store.job().view.get(key) is not None:
            return
        record = CheckpointRecord(
            attempt=attempt,
            step=step,
            generation=generation,
            type=CheckpointType.FULL,
            state=CheckpointState.COMMITTED,
            ranks=1,
            path="file:///x",
            manifest_digest="d",
        )
        latest = Latest(generation=generation, step=step, attempt=attempt, record_generation=generation)
        puts = [Put(key=key, value=encode(record))]
        before = self.store.job().latest()
        if before is None or (before.record.generation, before.record.step) < (generation, step):
            puts.append(Put(key=JOB.latest, value=encode(latest)))
        self.store.execute(Txn(compares=(unchanged(JOB.head, head.mod_revision),), success=tuple(puts)))

    def plan(self, leader: Leader, lag: int, *, settled: bool) -> None:
        leader.observer.catch_up(max(leader.observer.view.revision, self.store.revision - lag))
        planned = plan_world(leader.observer.job, keys=KEYS, epoch=leader.epoch, settled=settled)
        leader.under_way += planned.txns
        for txn in planned.txns:
            for put in txn.success:
                if isinstance(put, Put) and put.key == JOB.head:
                    head = decode(WorldHead, put.value)
                    names = tuple(sorted(leader.observer.job.view.names(JOB.workers)))
                    self.planned.setdefault((head.generation, head.epoch), []).append(names)

    def arrive(self, leader: Leader, index: int) -> None:
        """Let one of a leader's transactions take effect, in any order, perhaps much later."""
        if not leader.under_way:
            return
        txn = leader.under_way.pop(index % len(leader.under_way))
        before = self.store.job().head()
        epoch_now = self.leaders[-1].epoch
        if not self.store.execute(txn).succeeded:
            return
        assert leader.epoch == epoch_now, "a deposed leader wrote"
        after = self.store.job().head()
        if after is not None and (before is None or after.mod_revision != before.mod_revision):
            self.check_head(before.record if before is not None else None, after.record)

    def check_head(self, before: WorldHead | None, after: WorldHead) -> None:
        assert after.generation == (before.generation if before is not None else 0) + 1
        assert after.epoch == self.leaders[-1].epoch
        world = self.store.job().world()
        assert world is not None
        names = {member.worker for member in world.members}
        planned = self.planned[after.generation, after.epoch]
        assert any(names <= set(registered) for registered in planned), "foreign chunks"
        latest = self.store.job().latest()
        if latest is not None and not after.forming:
            assert after.restore is not None, "a restore point was overlooked"
            assert after.restore.attempt == latest.record.attempt


step = st.one_of(
    st.tuples(st.just("elect")),
    st.tuples(st.just("toggle"), st.sampled_from(NAMES)),
    st.tuples(st.just("toggle"), st.sampled_from(NAMES)),
    st.tuples(st.just("end"), st.integers(0, 8), st.sampled_from([0, 0, 1])),
    st.tuples(st.just("commit"), st.sampled_from([10, 20, 30])),
    st.tuples(st.just("plan"), st.integers(0, 2), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("plan"), st.integers(0, 2), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("arrive"), st.integers(0, 2), st.integers(0, 5)),
    st.tuples(st.just("arrive"), st.integers(0, 2), st.integers(0, 5)),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members a chunk, and transactions of about one: plans of several transactions."""
    monkeypatch.setattr(chunks, "MAX_CHUNK_MEMBERS", 2)
    monkeypatch.setattr(chunks, "MAX_BYTES", 250)


@given(st.lists(st.sampled_from(NAMES), max_size=6), st.lists(step, max_size=60))
@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.usefixtures("tiny")
def test_no_interleaving_breaks_a_world(first: list[str], steps: list[tuple[object, ...]]) -> None:
    race = Race()
    for name in first:
        race.toggle(name)
    for action in steps:
        match action:
            case ("elect",):
                race.elect()
            case ("toggle", str(name)):
                race.toggle(name)
            case ("end", int(rank), int(code)):
                race.end_rank(rank, code)
            case ("commit", int(at)):
                race.commit(at)
            case ("plan", int(back), int(lag), bool(settled)):
                leader = race.leaders[-1 - back % len(race.leaders)]
                race.plan(leader, lag, settled=settled)
            case ("arrive", int(back), int(index)):
                race.arrive(race.leaders[-1 - back % len(race.leaders)], index)
        assert race.store.problems() == []


@given(st.lists(step, max_size=40))
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.usefixtures("tiny")
def test_after_any_trouble_the_last_leader_ends_up_with_the_right_world(
    steps: list[tuple[object, ...]],
) -> None:
    race = Race()
    for name in NAMES[:4]:
        race.toggle(name)
    for action in steps:
        match action:
            case ("elect",):
                race.elect()
            case ("toggle", str(name)):
                race.toggle(name)
            case ("plan", int(back), int(lag), bool(settled)):
                race.plan(race.leaders[-1 - back % len(race.leaders)], lag, settled=settled)
            case ("arrive", int(back), int(index)):
                race.arrive(race.leaders[-1 - back % len(race.leaders)], index)
    race.elect()
    leader = race.leaders[-1]
    for _ in range(20):
        race.plan(leader, 0, settled=True)
        if not leader.under_way:
            break
        while leader.under_way:
            race.arrive(leader, 0)
    job = race.store.job()
    workers = {entry.name: entry.create_revision for entry in job.workers()}
    world = job.world()
    if job.phase() is not Phase.RUNNING:
        return
    if len(workers) < 2:
        assert world is None or world.head.forming
    else:
        assert world is not None
        members = {member.worker: member.incarnation for member in world.members}
        assert len(members) == min(5, len(workers))
        assert all(workers[name] == incarnation for name, incarnation in members.items())
    assert race.store.problems() == []
