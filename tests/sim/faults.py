"""The faults of the simulation: each is injected, is healed, and returns whether it took effect.

A fault is a coroutine over the cluster. Several faults may run at the same time. Each draws from its own random
source.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from strata.core.job import JobView
from strata.testing.links import host_of
from strata.testing.replicas import MemoryReplica
from tests.sim import rank_faults
from tests.sim.cluster import Cluster
from tests.sim.programs.members import REPLICAS, Member

Act = Callable[[Cluster, random.Random], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A class of faults, by name. `weight`: how often it is drawn, relative to the others."""

    name: str
    act: Act
    weight: int = 1


FAULTS: dict[str, Fault] = {}


def fault(name: str, *, weight: int = 1) -> Callable[[Act], Act]:
    def register(act: Act) -> Act:
        FAULTS[name] = Fault(name, act, weight)
        return act

    return register


def _some_replica(c: Cluster, rng: random.Random, *, leader: bool | None = None) -> MemoryReplica | None:
    """Return a running replica that is not frozen, or None; `leader` restricts it to the leader or to followers."""
    there = [r for r in c.replicas.values() if r.alive and not r.process.frozen]
    if leader is not None:
        there = [r for r in there if r.leads == leader]
    return rng.choice(there) if there else None


def _some_member(c: Cluster, rng: random.Random) -> Member | None:
    there = [
        m
        for m in c.members.values()
        if m.process.alive and not m.process.frozen and not m.leaving and not m.killed
    ]
    return rng.choice(there) if there else None


async def _crash(c: Cluster, rng: random.Random, replica: MemoryReplica | None, longest_s: float) -> bool:
    if replica is None:
        return False
    c.stopped.add(replica.name)
    replica.kill()
    await asyncio.sleep(rng.choice((rng.uniform(0, 1), rng.uniform(1, longest_s))))
    c.start_replica(replica.name)
    return True


@fault("replica crash", weight=2)
async def _replica_crash(c: Cluster, rng: random.Random) -> bool:
    return await _crash(c, rng, _some_replica(c, rng), 10)


@fault("leader crash", weight=2)
async def _leader_crash(c: Cluster, rng: random.Random) -> bool:
    return await _crash(c, rng, _some_replica(c, rng, leader=True), 10)


@fault("replica stop")
async def _replica_stop(c: Cluster, rng: random.Random) -> bool:
    """Stop a replica gracefully and start it again: half of a rolling restart."""
    replica = _some_replica(c, rng)
    if replica is None:
        return False
    c.stopped.add(replica.name)
    replica.replica.stop()
    task = replica.process.task
    assert task is not None
    await asyncio.wait([task], timeout=15)
    if not task.done():
        c.judge.wrong(f"{replica.name} was asked to stop and did not within 15 s")
        replica.kill()
    await asyncio.sleep(rng.uniform(0, 2))
    c.start_replica(replica.name)
    return True


@fault("all replicas gone")
async def _all_down(c: Cluster, rng: random.Random) -> bool:
    down = [r for r in c.replicas.values() if r.alive]
    if not down:
        return False
    for replica in down:
        c.stopped.add(replica.name)
        replica.kill()
    await asyncio.sleep(rng.uniform(0.5, 8))
    for replica in down:
        await asyncio.sleep(rng.uniform(0, 0.5))
        c.start_replica(replica.name)
    return True


async def _pause(rng: random.Random, replica: MemoryReplica | None) -> bool:
    if replica is None:
        return False
    held = replica.process.held
    replica.process.freeze()
    await asyncio.sleep(rng.choice((rng.uniform(0.2, 2), rng.uniform(2, 12))))
    replica.process.thaw()
    return replica.process.held > held


@fault("leader pause", weight=2)
async def _leader_pause(c: Cluster, rng: random.Random) -> bool:
    return await _pause(rng, _some_replica(c, rng, leader=True))


@fault("follower pause")
async def _follower_pause(c: Cluster, rng: random.Random) -> bool:
    return await _pause(rng, _some_replica(c, rng, leader=False))


@fault("all replicas pause")
async def _all_pause(c: Cluster, rng: random.Random) -> bool:
    """Freeze all replicas at the same moment, as on one host that swaps; thaw them one after another."""
    down = [r for r in c.replicas.values() if r.alive and not r.process.frozen]
    held = sum(r.process.held for r in down)
    for replica in down:
        replica.process.freeze()
    await asyncio.sleep(rng.choice((rng.uniform(0.5, 3), rng.uniform(3, 12))))
    for replica in down:
        replica.process.thaw()
        await asyncio.sleep(rng.uniform(0, 0.3))
    return sum(r.process.held for r in down) > held


@fault("suspend")
async def _suspend(c: Cluster, rng: random.Random) -> bool:
    """Suspend the host of one or all replicas, with everything on it. Only the boot clock shows this."""
    there = [r for r in c.replicas.values() if r.alive and not r.process.frozen]
    if not there:
        return False
    slept_s = rng.choice((rng.uniform(1, 5), rng.uniform(5, 600)))
    for replica in there if rng.random() < 0.5 else [rng.choice(there)]:
        replica.skew_s += slept_s
    return True


@fault("replica cut off from etcd and peers", weight=2)
async def _etcd_and_peers_cut(c: Cluster, rng: random.Random) -> bool:
    """Cut a replica off from etcd and its peers; members still reach it and the other replicas."""
    replica = _some_replica(c, rng)
    if replica is None:
        return False
    others = [name for name in REPLICAS if name != replica.name]
    replica.client.partition()
    silent_s = replica.context.mirror.silence_s()
    for other in others:
        c.board.cut(replica.name, f"{other}/peers")
        c.board.cut(other, f"{replica.name}/peers")
    await asyncio.sleep(rng.choice((rng.uniform(1, 5), rng.uniform(5, 25))))
    went_silent = replica.context.mirror.silence_s() > silent_s
    for other in others:
        c.board.mend(replica.name, f"{other}/peers")
        c.board.mend(other, f"{replica.name}/peers")
    if c.replicas[replica.name] is replica and replica.process.alive:
        replica.client.heal()
    return went_silent


@fault("replica cut off from etcd", weight=2)
async def _etcd_cut(c: Cluster, rng: random.Random) -> bool:
    replica = _some_replica(c, rng)
    if replica is None:
        return False
    replica.client.partition()
    silent_s = replica.context.mirror.silence_s()
    await asyncio.sleep(rng.choice((rng.uniform(0.5, 3), rng.uniform(3, 12))))
    went_silent = replica.context.mirror.silence_s() > silent_s
    if c.replicas[replica.name] is replica and replica.process.alive:
        replica.client.heal()
    return went_silent


@fault("replica isolated")
async def _isolated(c: Cluster, rng: random.Random) -> bool:
    """Drop a replica's messages to and from members and peers silently; it still reaches etcd."""
    replica = _some_replica(c, rng)
    if replica is None:
        return False
    others = _everybody_else(c, replica.name)
    for other in others:
        c.board.block(replica.name, other)
        c.board.block(other, replica.name)
    links = sum(len(c.board.between(replica.name, other)) for other in others)
    await asyncio.sleep(rng.uniform(1, 8))
    for other in others:
        c.board.unblock(replica.name, other)
        c.board.unblock(other, replica.name)
    return links > 0


def _everybody_else(c: Cluster, name: str) -> list[str]:
    return [*(m.host for m in c.members.values()), *(other for other in REPLICAS if other != name)]


@fault("one-way cut")
async def _one_way(c: Cluster, rng: random.Random) -> bool:
    """Drop all messages from a replica to another, or between a replica and a member in one direction."""
    sender = rng.choice(REPLICAS)
    member = _some_member(c, rng) if rng.random() < 0.5 else None
    if member is not None:
        receiver = member.host
        if rng.random() < 0.5:
            sender, receiver = receiver, sender
    else:
        receiver = rng.choice([name for name in REPLICAS if name != sender])
    links = c.board.between(sender, receiver)
    c.board.block(sender, receiver)
    until = asyncio.get_running_loop().time() + rng.uniform(0.5, 6)
    while asyncio.get_running_loop().time() < until:
        if member is not None:
            c.note_disturbed(member)
        await asyncio.sleep(0.25)
    c.board.unblock(sender, receiver)
    return bool(links)


@fault("reject between replicas")
async def _reject(c: Cluster, rng: random.Random) -> bool:
    """Make two replicas reset each other's links and refuse new links, although neither has died."""
    one, other = rng.sample(REPLICAS, 2)
    broken = c.board.reject(one, f"{other}/peers") + c.board.reject(other, f"{one}/peers")
    await asyncio.sleep(rng.uniform(1, 8))
    c.board.mend(one, f"{other}/peers")
    c.board.mend(other, f"{one}/peers")
    return broken > 0


@fault("link break", weight=2)
async def _link_break(c: Cluster, rng: random.Random) -> bool:
    """Break links; the messages in flight are lost."""
    broken = 0
    for _ in range(rng.randrange(1, 6)):
        await asyncio.sleep(rng.uniform(0, 0.4))
        member = _some_member(c, rng)
        replica = rng.choice(REPLICAS)
        peer = rng.choice([name for name in REPLICAS if name != replica])
        member_links = [
            link
            for name in REPLICAS
            for link in (c.board.between(member.host, name) if member is not None else [])
        ]
        links = member_links if rng.random() < 0.5 else c.board.between(replica, peer)
        for link in links:
            link.break_off()
            broken += 1
        if links and links is member_links and member is not None:
            c.note_disturbed(member)
    return broken > 0


@fault("delay")
async def _delay(c: Cluster, rng: random.Random) -> bool:
    """Delay messages of one replica and of some members."""
    chosen = [rng.choice(REPLICAS), *(m.host for m in c.members.values() if rng.random() < 0.3)]
    longest_s = rng.choice((0.02, 0.1, 0.4))
    before, delayed = c.board.lag_s, 0

    def lag_s(sender: str, receiver: str) -> float:
        nonlocal delayed
        if host_of(sender) in chosen or host_of(receiver) in chosen:
            delayed += 1
            return rng.random() * longest_s
        return before(sender, receiver)

    c.board.lag_s = lag_s
    await asyncio.sleep(rng.uniform(1, 6))
    c.board.lag_s = lambda _sender, _receiver: 0.0
    return delayed > 0


# -- etcd -------------------------------------------------------------------------------------


@fault("stale view", weight=2)
async def _stale(c: Cluster, rng: random.Random) -> bool:
    line = c.lines[rng.choice(REPLICAS)]
    before = line.counts["stale batch"]
    line.stale_s = rng.choice((0.1, 0.5, 3.0, 16.0))
    await asyncio.sleep(rng.uniform(1, 8))
    line.stale_s = 0.0
    return line.counts["stale batch"] > before


async def _flaky(c: Cluster, rng: random.Random, which: str, counted: str) -> bool:
    lines = [c.lines[name] for name in rng.sample(REPLICAS, rng.randrange(1, 4))]
    before = sum(line.counts[counted] for line in lines)
    for line in lines:
        setattr(line, which, rng.uniform(0.1, 0.4))
    await asyncio.sleep(rng.uniform(1, 8))
    for line in lines:
        setattr(line, which, 0.0)
    return sum(line.counts[counted] for line in lines) > before


@fault("writes lost")
async def _lost(c: Cluster, rng: random.Random) -> bool:
    return await _flaky(c, rng, "lose_request", "write lost")


@fault("writes applied unheard", weight=2)
async def _unanswered(c: Cluster, rng: random.Random) -> bool:
    return await _flaky(c, rng, "lose_answer", "write unanswered")


@fault("writes applied late", weight=2)
async def _late(c: Cluster, rng: random.Random) -> bool:
    return await _flaky(c, rng, "late", "write late")


@fault("etcd without a leader")
async def _leaderless(c: Cluster, rng: random.Random) -> bool:
    """Fail all calls and break all watches. The next leader of etcd grants each lease its full time again."""
    c.store.hold_leases()
    lines = list(c.lines.values())
    before = sum(line.counts["leaderless"] for line in lines)
    for line in lines:
        line.leaderless = True
    for replica in c.replicas.values():
        replica.client.break_watches()
    await asyncio.sleep(rng.uniform(0.5, 6))
    for line in lines:
        line.leaderless = False
    c.store.release_leases()
    return sum(line.counts["leaderless"] for line in lines) > before


@fault("lease lost")
async def _lease_lost(c: Cluster, rng: random.Random) -> bool:
    """End a lease early, the leader's or a replica's; sometimes its keepalives still succeed."""
    keys = [kv for kv in c.judge.view.walk(c.keys.root) if kv.lease]
    if not keys:
        return False
    leads = [kv for kv in keys if kv.key == c.keys.leader]
    lease = rng.choice(leads if leads and rng.random() < 0.6 else keys).lease
    if rng.random() < 0.5:
        return c.store.drop_keys_of(lease) > 0
    c.store.revoke(lease)
    return True


@fault("compaction")
async def _compaction(c: Cluster, rng: random.Random) -> bool:
    """Compact the history while a replica's watch is cut off, so that the replica has to list all keys again."""
    replica = _some_replica(c, rng)
    if replica is None:
        return False
    seen = replica.view.revision
    replica.client.partition()
    await asyncio.sleep(rng.uniform(0.5, 3))
    c.store.compact(c.store.state.head)
    compacted = c.store.state.compacted > seen + 1
    if c.replicas[replica.name] is replica and replica.process.alive:
        replica.client.heal()
    return compacted


@fault("watch cancelled", weight=2)
async def _cancelled(c: Cluster, rng: random.Random) -> bool:
    cancelled = 0
    for _ in range(rng.randrange(1, 5)):
        await asyncio.sleep(rng.uniform(0, 1))
        replica = _some_replica(c, rng)
        if replica is not None:
            cancelled += replica.client.break_watches()
    return cancelled > 0


# -- members ----------------------------------------------------------------------------------


@fault("member pause")
async def _member_pause(c: Cluster, rng: random.Random) -> bool:
    member = _some_member(c, rng)
    if member is None:
        return False
    held = member.process.held
    member.process.freeze()
    c.note_disturbed(member)
    await asyncio.sleep(rng.choice((rng.uniform(0.2, 2), rng.uniform(2, 10))))
    c.note_disturbed(member)
    member.process.thaw()
    return member.process.held > held


@fault("member crash", weight=2)
async def _member_crash(c: Cluster, rng: random.Random) -> bool:
    """Kill a member, and start it as another process: immediately, or after its replica has noticed the death."""
    member = _some_member(c, rng)
    if member is None:
        return False
    c.stopped.add(member.worker)
    member.kill()
    await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 1), rng.uniform(1, 8))))
    c.start_member(member.worker)
    return True


@fault("member leaves")
async def _member_leaves(c: Cluster, rng: random.Random) -> bool:
    """Make a member leave for good, and start another process with its name."""
    member = _some_member(c, rng)
    if member is None or member.process.task is None:
        return False
    c.stopped.add(member.worker)
    member.ask_to_leave()
    await asyncio.wait([member.process.task], timeout=10)
    if rng.random() < 0.5:
        await asyncio.sleep(rng.uniform(0, 4))
    member.kill()
    c.start_member(member.worker)
    return True


@fault("newcomer for a frozen member")
async def _newcomer(c: Cluster, rng: random.Random) -> bool:
    """Start a second process with the name of a frozen member, which is thawed later."""
    member = _some_member(c, rng)
    if member is None:
        return False
    member.process.freeze()
    c.note_disturbed(member)
    await asyncio.sleep(rng.uniform(0, 2))
    before = JobView(c.judge.view, c.judge.job).worker(member.worker)
    newcomer = c.start_member(member.worker)
    await asyncio.sleep(rng.uniform(3, 9))
    c.note_disturbed(member)
    member.process.thaw()
    await asyncio.sleep(2)
    if member.process.alive:
        member.kill()
    after = JobView(c.judge.view, c.judge.job).worker(member.worker)
    return before is not None and after is not None and after.record.boot == newcomer.boot


# -- ranks ------------------------------------------------------------------------------------

fault("rank crash")(rank_faults.crash)
fault("rank stopped", weight=2)(rank_faults.stopped)
fault("rank disconnected", weight=2)(rank_faults.disconnected)
fault("agent and ranks frozen", weight=2)(rank_faults.host_frozen)
fault("agent crash")(rank_faults.agent_crash)
fault("rival rank")(rank_faults.rival)
