"""Successive leaders that plan on lagging views, interleaved at every transaction."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from strata.core.checkpoints.attempt import Author
from strata.core.ids import AttemptId, WorkerId
from strata.core.job_requests import decide_resume, decide_scale
from strata.core.kv import chunks
from strata.core.kv.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    JobPhase,
    Latest,
    Phase,
    StopAction,
    WorldHead,
    decode,
    encode,
)
from strata.core.kv.txn import Put, Txn, unchanged
from strata.core.members.membership import decide_rank_exit
from strata.core.members.newcomers import MOST_S
from strata.core.stop.requests import (
    StopRequest,
    decide_stop,
    revisions,
)
from strata.core.stop.save_hold import decide_hold_saves
from strata.core.worlds.planning import plan_world
from strata.errors import StrataError
from tests.not_none import not_none
from tests.unit.core.rig import JOB, KEYS, Observer, Store, lead, leave, register

SEEDS = 150
ASKING_SEEDS = 90
DRAIN = StopAction.DRAIN
NAMES = [f"w{index}" for index in range(7)]


@dataclass
class Leader:
    """One leader term, which may not know yet that it has ended."""

    observer: Observer
    epoch: int
    under_way: list[Txn] = field(default_factory=list)
    """Transactions planned and sent, which may arrive late."""


class Race:
    """The store, its leaders so far, and the events that may happen."""

    def __init__(self) -> None:
        self.store = Store()
        self.leaders: list[Leader] = []
        self.elect()
        self.heads: list[WorldHead] = []
        self.planned: dict[tuple[int, int], list[tuple[str, ...]]] = {}
        self.decisions: Counter[str] = Counter()
        self.held_ended = 0
        """Generations that ended while they could not save."""

    def elect(self) -> None:
        epoch = lead(self.store, f"r{len(self.leaders)}")
        self.leaders.append(Leader(Observer(self.store), epoch))

    def toggle(self, name: str) -> None:
        if self.store.live.worker(name) is None:
            spec = {"min_workers": 2, "max_workers": 5, "max_no_progress_generations": 3}
            if self.store.live.phase() is Phase.RUNNING:
                register(self.store, name, slots=1 + int(name[1:]) % 3, **spec)
        else:
            leave(self.store, name)

    def end_rank(self, rank: int, code: int) -> None:
        world = self.store.live.world()
        if world is None or rank >= world.head.size:
            return
        member = world.member_of(rank)
        decision = decide_rank_exit(
            self.store.live,
            WorkerId(member.worker),
            member.incarnation,
            world.head.generation,
            rank,
            code,
        )
        if decision.txn is not None:
            self.store.execute(decision.txn)

    def commit(self, step: int) -> None:
        """Commit a checkpoint as in PROTOCOLS 8.3, but with the begin and the completion in one write."""
        head = self.store.live.head()
        if head is None or head.record.forming:
            return
        generation, attempt = head.record.generation, AttemptId(f"a{self.store.revision}")
        key = JOB.checkpoint(step, generation)
        if self.store.live.view.get(key) is not None:
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
        before = self.store.live.latest()
        if before is None or (before.record.generation, before.record.step) < (generation, step):
            puts.append(Put(key=JOB.latest, value=encode(latest)))
        self.store.execute(Txn(compares=(unchanged(JOB.head, head.mod_revision),), success=tuple(puts)))

    def ask(self, what: str, least: int) -> None:
        """Scale, stop or resume the job on an up-to-date view."""
        live = self.store.live
        world = live.world()
        try:
            match what:
                case "scale":
                    decision = decide_scale(live, min_workers=least, max_workers=least + 2)
                case "resume":
                    decision = decide_resume(live)
                case "drain":
                    first = world.members[0].worker if world is not None and world.members else "w0"
                    decision = decide_stop(live, StopRequest(action=DRAIN, workers=(WorkerId(first),)))
                case _:
                    request = StopRequest(action=StopAction(what), now=least == 1)
                    decision = decide_stop(live, request)
        except StrataError:
            return
        if decision.txn is not None:
            assert self.store.execute(decision.txn).succeeded
            self.decisions[what] += 1

    def plan(self, leader: Leader, lag: int, *, settled: bool, request_ages_s: float = 0.0) -> None:
        leader.observer.catch_up(max(leader.observer.view.revision, self.store.revision - lag))
        planned = plan_world(
            leader.observer.job,
            keys=KEYS,
            epoch=leader.epoch,
            settled=settled,
            request_ages_s=dict.fromkeys(revisions(leader.observer.job), request_ages_s),
            now_unix_ms=0,
        )
        leader.under_way += planned.txns
        for txn in planned.txns:
            for put in txn.success:
                if isinstance(put, Put) and put.key == JOB.head:
                    head = decode(WorldHead, put.value)
                    names = tuple(sorted(leader.observer.job.view.names(JOB.workers)))
                    self.planned.setdefault((head.generation, head.epoch), []).append(names)

    def arrive(self, leader: Leader, index: int) -> None:
        """Execute one of a leader's transactions, in any order and perhaps late."""
        if not leader.under_way:
            return
        txn = leader.under_way.pop(index % len(leader.under_way))
        before, held = self.store.live.head(), self.held()
        epoch_now = self.leaders[-1].epoch
        if not self.store.execute(txn).succeeded:
            return
        assert leader.epoch == epoch_now, "a deposed leader wrote"
        after = self.store.live.head()
        if held and before is not None and after is not None:
            self.check_held(before.record, after.record)
        if after is not None and (before is None or after.mod_revision != before.mod_revision):
            self.check_head(before.record if before is not None else None, after.record)

    def end(self, *, request_ages_s: float = 0.0) -> None:
        """Elect a last leader and let it write everything that is left to write."""
        self.elect()
        leader = self.leaders[-1]
        for _ in range(20):
            self.plan(leader, 0, settled=True, request_ages_s=request_ages_s)
            while leader.under_way:
                self.arrive(leader, 0)
        assert self.store.problems() == []

    def hold(self, step: int) -> None:
        """Report for rank 0 that it has trained to `step` and cannot save this step."""
        world = self.store.live.world()
        if world is None or world.head.forming:
            return
        member = world.member_of(0)
        author = Author(
            worker=member.worker, incarnation=member.incarnation, generation=world.head.generation, rank=0
        )
        decision = decide_hold_saves(self.store.live, author=author, step=step, reason="disk full", host="a")
        if decision.txn is not None:
            self.store.execute(decision.txn)

    def held(self) -> bool:
        """Return whether the current generation has trained but saved nothing because its saves are held."""
        live = self.store.live
        head, latest = live.head(), live.latest()
        if head is None or live.held(head.record.generation) is None:
            return False
        return latest is None or latest.record.record_generation != head.record.generation

    def check_held(self, before: WorldHead, after: WorldHead) -> None:
        """Assert that a held generation does not count as one without progress, and does not reset this count."""
        phase = self.store.live.view.record(JOB.phase, JobPhase)
        assert phase is None or "in a row failed without a checkpoint" not in phase.reason
        if after.generation != before.generation:
            self.held_ended += 1
            assert after.no_progress in {before.no_progress, 0}, "a held save counted"

    def check_head(self, before: WorldHead | None, after: WorldHead) -> None:
        self.heads.append(after)
        assert after.generation == (before.generation if before is not None else 0) + 1
        assert after.epoch == self.leaders[-1].epoch
        names = {member.worker for member in not_none(self.store.live.world()).members}
        planned = self.planned[after.generation, after.epoch]
        assert any(names <= set(registered) for registered in planned), "foreign chunks"
        latest = self.store.live.latest()
        if latest is not None and not after.forming:
            assert after.restore is not None, "a restore point was overlooked"
            assert after.restore.attempt == latest.record.attempt


def steps(rng: random.Random, count: int, *, asking: bool) -> Iterator[tuple[object, ...]]:
    """Yield random events; with `asking` also operators' requests."""
    kinds = ["toggle", "plan", "arrive", "work", "elect", "end", "commit", "ask", "hold"]
    weights = [3, 4, 8, 2, 0.4, 3.0 if asking else 0.6, 0.6, 1.5 if asking else 0, 0.8]
    for _ in range(count):
        match rng.choices(kinds, weights)[0]:
            case "toggle":
                yield "toggle", rng.choice(NAMES)
            case "plan":
                yield "plan", rng.choice([0, 0, 0, 1]), rng.choice([0, 0, 1, 3]), rng.random() < 0.8
            case "arrive":
                yield "arrive", rng.choice([0, 0, 0, 1]), rng.choice([0, 0, 0, 1, 2, 5])
            case "work":
                for _ in range(rng.randrange(1, 3)):
                    yield "plan", 0, 0, True
                    for _ in range(rng.randrange(1, 5)):
                        yield "arrive", 0, 0
            case "end":
                yield "end", rng.randrange(9), rng.choice([0, 75, 75, 75, 1] if asking else [0, 0, 1])
            case "ask":
                yield "ask", rng.choice(["scale", "resume", "drain", "pause", "preempt"]), rng.randrange(1, 4)
            case "commit":
                yield "commit", rng.choice([10, 20, 30])
            case "hold":
                yield "hold", rng.choice([5, 15, 25, 35])
            case _:
                yield ("elect",)


def run(seed: int, *, asking: bool = False) -> Race:
    rng = random.Random(seed)
    race = Race()
    for name in rng.sample(NAMES, rng.randrange(2, 7)):
        race.toggle(name)
    for action in steps(rng, rng.randrange(20, 80), asking=asking):
        match action:
            case ("elect",):
                race.elect()
            case ("toggle", str(name)):
                race.toggle(name)
            case ("end", int(rank), int(code)):
                race.end_rank(rank, code)
            case ("ask", str(what), int(least)):
                race.ask(what, least)
            case ("commit", int(at)):
                race.commit(at)
            case ("hold", int(at)):
                race.hold(at)
            case ("plan", int(back), int(lag), bool(settled)):
                race.plan(race.leaders[-1 - back % len(race.leaders)], lag, settled=settled)
            case ("arrive", int(back), int(index)):
                race.arrive(race.leaders[-1 - back % len(race.leaders)], index)
        assert race.store.problems() == []
    return race


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit chunks to two members and transactions to about one chunk, so that plans have several."""
    monkeypatch.setattr(chunks, "MAX_CHUNK_MEMBERS", 2)
    monkeypatch.setattr(chunks, "MAX_BYTES", 250)


def test_no_interleaving_breaks_a_world() -> None:
    races = [run(seed) for seed in range(SEEDS)]
    # the test is meaningful only if every kind of event occurs often
    assert sum(len(race.heads) for race in races) > 2 * SEEDS
    assert sum(any(head.forming for head in race.heads) for race in races) > SEEDS / 20
    assert sum(any(head.chunks > 1 for head in race.heads) for race in races) > SEEDS / 5
    assert sum(len(race.leaders) > 1 for race in races) > SEEDS / 5
    assert sum(race.held_ended for race in races) > SEEDS / 20


def test_after_any_error_the_last_leader_ends_up_with_the_right_world() -> None:
    running = 0
    for seed in range(SEEDS):
        race = run(seed)
        race.end(request_ages_s=MOST_S)  # a failed newcomer is kept out for at most that long
        job = race.store.live
        if job.phase() is not Phase.RUNNING:
            continue
        running += 1
        workers = {entry.name: entry.create_revision for entry in job.workers()}
        world = job.world()
        done = job.done(world.head.generation) if world is not None else set()
        if world is None or world.head.forming:
            assert len(workers) < 2, f"seed {seed}"
            continue
        members = {member.worker: member.incarnation for member in world.members}
        departed = {name for name, incarnation in members.items() if workers.get(name) != incarnation}
        finished = {member.worker for member in world.members if {*member.ranks} <= done}
        assert departed <= finished, f"seed {seed}"
        if not done:
            assert len(members) == min(5, len(workers)), f"seed {seed}"
    assert running > SEEDS / 2


def test_operator_requests_at_any_time_break_no_world() -> None:
    """Every intermediate state is sound, and the last leader reaches the requested state."""
    requests: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for seed in range(ASKING_SEEDS):
        race = run(seed, asking=True)
        requests += race.decisions
        race.end(request_ages_s=1e9)
        job = race.store.live
        world, spec, phase = job.world(), job.spec(), job.phase()
        forming = world is None or world.head.forming
        ends[f"{phase.value}{' forming' if forming else ''}"] += 1
        if phase is Phase.PAUSED:
            assert forming, f"seed {seed}: a paused job has a world"
        elif phase is Phase.RUNNING and spec is not None:
            here = len(job.workers())
            if world is None or world.head.forming:
                assert here < spec.record.min_workers, f"seed {seed}"
            elif not job.done(world.head.generation):
                assert len(world.members) == min(spec.record.max_workers, here), f"seed {seed}"
                assert job.notice(world.head.generation) is None, f"seed {seed}"
    assert (
        min(requests[what] for what in ("scale", "resume", "drain", "pause", "preempt")) > ASKING_SEEDS / 20
    ), requests
    assert ends["paused forming"] > ASKING_SEEDS / 20
    assert ends["running"] > ASKING_SEEDS / 5
