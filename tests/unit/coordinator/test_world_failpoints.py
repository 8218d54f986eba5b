"""The leader dies in the middle of a world change, at every transaction boundary, in three ways.

Any of the dead leader's writes may have taken effect, or take effect later. The next leader must still complete
exactly the world that was due: no generation repeats or is left out, and the keyspace is consistent at every
revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from strata.core.ids import AttemptId, WorkerId
from strata.core.invariants import check
from strata.core.job import JobView
from strata.core.job_requests import decide_scale
from strata.core.kv import chunks
from strata.core.kv.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    Latest,
    Phase,
    StopAction,
    WorldHead,
    decode,
    encode,
)
from strata.core.kv.txn import Decision, Put, Txn
from strata.core.kv.view import View
from strata.core.members.membership import decide_rank_exit
from strata.core.stop.last_step import BEGIN_BARRIER
from strata.core.stop.requests import (
    StopRequest,
    decide_stop,
)
from strata.testing.memory_store import MemoryStore
from strata.testing.mvcc import Revision
from strata.testing.network import PROMPT, Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time
from tests.not_none import not_none
from tests.unit.coordinator.serving_rig import JOB, KEYS, Cluster, Node, cluster
from tests.unit.core.rig import release

MODES = ("unsent", "unanswered", "late")
LATE_S = 15.0
"""Delay in seconds: longer than the next leader's election and its new world take."""
DUE_S = 60.0
MEMBERS = 5


class Failpoint(PromptNetwork):
    """Once armed, kill the replica at its `at`-th write to the job as leader.

    Modes:
    unsent: it dies before the request leaves.
    unanswered: it dies once the write has taken effect.
    late: it dies when the request leaves; the write takes effect `LATE_S` seconds later.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.at = 0
        self.count = 0
        self.fired = False
        self._node: Node | None = None
        self._dying: Call | None = None

    def arm(self, node: Node, at: int) -> None:
        self._node, self.at = node, at

    def fate(self, call: Call) -> Fate:
        if self._node is None or self.fired or not _is_world_change(call):
            return PROMPT
        self.count += 1
        if self.count != self.at:
            return PROMPT
        if self.mode == "unanswered":
            self._dying = call
            return PROMPT
        self._kill(cut=self.mode == "unsent")
        return Fate(delay_s=LATE_S) if self.mode == "late" else Fate(lost="request")

    def applied(self, call: Call) -> None:
        if call is self._dying:
            self._kill(cut=True)

    def _kill(self, *, cut: bool) -> None:
        """End the replica as SIGKILL would. Requests under way still arrive, unless `cut`."""
        self.fired = True
        assert self._node is not None
        assert self._node.task is not None
        if cut:
            self._node.client.partition()
        self._node.task.cancel()


def _is_world_change(call: Call) -> bool:
    txn = call.argument
    return (
        isinstance(txn, Txn)
        and any(compare.key == KEYS.leader for compare in txn.compares)
        and any(operation.key.startswith(JOB.root) for operation in txn.success)
    )


@dataclass
class RankObserver:
    """Check at every revision that the keyspace is consistent and that each head follows the one before."""

    store: MemoryStore
    view: View = field(default_factory=View)
    heads: list[WorldHead] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def seen(self, written: Revision) -> None:
        self.view.apply(written.number, written.events)
        self.wrong += check(self.view, KEYS)
        for event in written.events:
            if event.kv.key == JOB.head:
                head = decode(WorldHead, event.kv.value)
                if head.generation != len(self.heads) + 1:
                    self.wrong.append(f"generation {head.generation} came after {len(self.heads)}")
                self.heads.append(head)


class Play:
    """Three replicas, of which the leader is to die, and five members that a surviving replica serves."""

    def __init__(self, replicas: Cluster, leader: Node, survivor: Node) -> None:
        self.fleet = replicas
        self.leader = leader
        self.survivor = survivor

    @property
    def job(self) -> JobView:
        return JobView(self.survivor.view, JOB)

    async def settle(self, decide: Callable[[JobView], Decision]) -> None:
        await self.survivor.context.executor.settle(lambda view: decide(JobView(view, JOB)))

    async def ends(self, rank: int, code: int) -> None:
        world = not_none(self.job.world())
        member = world.member_of(rank)
        await self.settle(
            lambda job: decide_rank_exit(
                job, member.worker, member.incarnation, world.head.generation, rank, code
            )
        )

    async def stop(self, action: StopAction, *workers: str) -> None:
        # without this release the leader would not wait for ranks
        self.fleet.store.execute(release(JOB, BEGIN_BARRIER))
        request = StopRequest(action=action, reason="asked", workers=tuple(map(WorkerId, workers)))
        await self.settle(lambda job: decide_stop(job, request))

    async def leave(self, worker: str) -> None:
        await self.fleet.leave(self.survivor, worker)

    def save(self) -> None:
        """Let step 20 be committed, and step 30 be open without any ack."""
        for step, state in ((20, CheckpointState.COMMITTED), (30, CheckpointState.OPEN)):
            record = CheckpointRecord(
                attempt=AttemptId(f"a{step}"),
                step=step,
                generation=1,
                type=CheckpointType.FULL,
                state=state,
                ranks=MEMBERS,
                path="file:///x",
                manifest_digest="d",
            )
            puts = [Put(key=JOB.checkpoint(step, 1), value=encode(record))]
            if step == 20:
                latest = Latest(generation=1, step=20, attempt=AttemptId("a20"), record_generation=1)
                puts.append(Put(key=JOB.latest, value=encode(latest)))
            self.fleet.store.execute(Txn(success=tuple(puts)))


@dataclass(frozen=True)
class Change:
    """A world change: its trigger, the state that must hold before it, and the expected state after it."""

    trigger: Callable[[Play], Awaitable[None]]
    members: int
    generation: int = 2
    phase: Phase = Phase.RUNNING
    before: Callable[[Play], Awaitable[None]] | None = None
    least: int = 2
    most: int = MEMBERS
    limit: int = 3
    first: int = MEMBERS
    """Number of members before the trigger."""
    restores: int | None = None


async def _all_but_rank_4(play: Play) -> None:
    for rank in range(4):
        await play.ends(rank, 75)


async def _pausing(play: Play) -> None:
    await play.stop(StopAction.PAUSE)
    await _all_but_rank_4(play)


async def _preempting(play: Play) -> None:
    await play.stop(StopAction.PREEMPT)
    await _all_but_rank_4(play)


async def _draining(play: Play) -> None:
    await play.stop(StopAction.DRAIN, "w0", "w4")
    await play.ends(0, 75)


async def _saved(play: Play) -> None:
    play.save()


async def _finishing(play: Play) -> None:
    for rank in range(4):
        await play.ends(rank, 0)


async def _last_member(play: Play) -> None:
    await play.fleet.register(play.survivor, "w4")


CHANGES = {
    "the first world": Change(_last_member, MEMBERS, generation=1, first=4),
    "a death": Change(lambda play: play.leave("w1"), 4, before=_saved, restores=20),
    "a failed rank": Change(lambda play: play.ends(3, 1), MEMBERS),
    "a death below min": Change(lambda play: play.leave("w1"), 0, least=MEMBERS, before=_saved),
    "a smaller spec": Change(lambda play: play.settle(partial(decide_scale, max_workers=3)), 3),
    "a larger spec": Change(lambda play: play.settle(partial(decide_scale, max_workers=5)), MEMBERS, most=4),
    "all have stopped to pause": Change(
        lambda play: play.ends(4, 75), 0, before=_pausing, phase=Phase.PAUSED
    ),
    "all have stopped to leave": Change(lambda play: play.ends(4, 75), 0, before=_preempting),
    "two have stopped to leave": Change(lambda play: play.ends(4, 75), 3, before=_draining),
    "the last fruitless one": Change(
        lambda play: play.ends(3, 1), MEMBERS, generation=1, limit=1, phase=Phase.FAILED
    ),
    "all are done": Change(
        lambda play: play.ends(4, 0), MEMBERS, generation=1, before=_finishing, phase=Phase.DONE
    ),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit chunks to two members and transactions to about one chunk, so that a world needs several transactions."""
    monkeypatch.setattr(chunks, "MAX_CHUNK_MEMBERS", 2)
    monkeypatch.setattr(chunks, "MAX_BYTES", 250)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_leader_that_dies_in_a_world_change_leaves_one_world(name: str, mode: str) -> None:
    boundaries = 0
    while _dies(CHANGES[name], mode, boundaries + 1):
        boundaries += 1
    several = CHANGES[name].members >= 3 and CHANGES[name].phase is Phase.RUNNING
    assert boundaries >= (3 if several else 1), "a change of several transactions was to be cut at each"


def _dies(change: Change, mode: str, at: int) -> bool:
    """Kill the leader at its `at`-th write of this change; return whether it made so many writes."""
    fired = False

    @in_virtual_time()
    async def scenario() -> None:
        nonlocal fired
        store = MemoryStore()
        watcher = RankObserver(store)
        store.subscribe(watcher.seen)
        async with cluster(0, store=store, idle=True) as replicas:
            points = {name: Failpoint(mode) for name in ("r1", "r2", "r3")}
            for name, point in points.items():
                await replicas.add(name, network=point).context.mirror.started()
            leader = await replicas.leader()
            play = Play(replicas, leader, next(n for n in replicas.all if n is not leader))
            await _begin(play, change)
            points[leader.name].arm(leader, at)
            await change.trigger(play)
            await _until(play, partial(_met, change))
            await asyncio.sleep(LATE_S + 5)  # the late write has arrived, and every replica has seen it
            assert watcher.wrong == []
            assert _met(change, play.job)
            fired = points[leader.name].fired
            leading = [node.name for node in replicas.alive if node.leads]
            assert len(leading) == 1
            assert (leading == [leader.name]) != fired
            assert [int(entry.name) for entry in play.job.history()] == [*range(1, change.generation + 1)]

    scenario()
    return fired


async def _begin(play: Play, change: Change) -> None:
    spec = {
        "min_workers": change.least,
        "max_workers": change.most,
        "max_no_progress_generations": change.limit,
        "settle_s": 0.5,
    }
    for index in range(change.first):
        await play.fleet.register(play.survivor, f"w{index}", **spec)
    if change.first == MEMBERS:
        await _until(play, lambda job: job.world() is not None)
    if change.before is not None:
        await change.before(play)
    await asyncio.sleep(0 if change.first < MEMBERS else 3)  # until the world has settled


async def _until(play: Play, met: Callable[[JobView], bool]) -> None:
    async with asyncio.timeout(DUE_S):
        await play.survivor.context.mirror.wait_until(lambda view: met(JobView(view, JOB)))


def _met(change: Change, job: JobView) -> bool:
    head = job.head()
    if head is None or (head.record.generation, job.phase()) != (change.generation, change.phase):
        return False
    restore = head.record.restore
    assert (restore.step if restore is not None else None) == change.restores
    return head.record.members == change.members
