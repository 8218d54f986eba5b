"""A dead leader is replaced immediately; a leader that lives, or may live, is not (PROTOCOLS 4.7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from strata.core.kv.txn import Range
from strata.core.leadership.takeover import PEACE_S
from strata.testing.network import Fate
from strata.testing.serving import peer_address
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from tests.unit.coordinator.rig import Scripted, in_rig, now
from tests.unit.coordinator.serving_rig import KEYS, Cluster, Member, Node, cluster, in_cluster, in_world

THREE = ("r1", "r2", "r3")


def epoch(c: Cluster) -> int:
    kvs = c.store.read(Range(key=KEYS.leader)).kvs
    return kvs[0].create_revision if kvs else 0


def leading(c: Cluster) -> list[Node]:
    return [node for node in c.alive if node.context.election.epoch is not None]


async def leader(c: Cluster, *, after: int = 0) -> Node:
    """Return the replica that leads in an epoch above `after`."""
    async with asyncio.timeout(30):
        while True:
            for node in leading(c):
                if (node.context.election.epoch or 0) > after:
                    return node
            await asyncio.sleep(0.001)


@in_rig(cluster)
async def test_a_leader_killed_again_and_again_is_followed_each_time(c: Cluster) -> None:
    for _ in range(6):
        old = await leader(c)
        before, began = epoch(c), now()
        old.kill()
        await leader(c, after=before)
        assert now() - began < 0.1
        await c.start(old.name)


@pytest.mark.parametrize("kinds", [("grant",), ("execute",), ("grant", "execute")], ids="+".join)
@in_cluster(leader, replicas=1)
async def test_a_follower_survives_lost_etcd_requests_during_a_takeover(
    c: Cluster, old: Node, kinds: tuple[str, ...]
) -> None:
    network = Scripted()
    await c.start("r2", "r3", network=network)
    before = epoch(c)
    network.begin()
    network.says = lambda call: Fate(lost="request" if call.kind in kinds else None)
    old.kill()
    await asyncio.sleep(1.0)
    assert [call for call in network.calls if call.kind in kinds]
    network.says = lambda _call: Fate()
    await leader(c, after=before)
    assert len(c.alive) == 2


def stalled(c: Cluster, other: str, old: str) -> None:
    for link in c.board.links(other, peer_address(old)):
        link.stall()


def reset(c: Cluster, other: str, old: str) -> None:
    for link in c.board.links(other, peer_address(old)):
        link.break_off()


@pytest.mark.parametrize("cut", [stalled, Cluster.partition, reset])
@in_cluster(leader)
async def test_a_leader_cut_off_from_its_peers_stays_leader_while_its_port_answers(
    c: Cluster, old: Node, cut: Callable[[Cluster, str, str], None]
) -> None:
    before = epoch(c)
    for other in set(THREE) - {old.name}:
        cut(c, other, old.name)
    await asyncio.sleep(20)
    assert epoch(c) == before
    for other in set(THREE) - {old.name}:
        c.heal(other, old.name)
    await c.ready()


@in_world(*THREE)
async def test_repeated_refused_connections_depose_a_live_leader_once_per_interval(
    c: Cluster, members: list[Member]
) -> None:
    old = await leader(c)
    follower = next(name for name in THREE if name != old.name)

    def reject() -> None:
        c.board.reject(follower, peer_address(old.name))
        c.board.reject(old.name, peer_address(follower))

    first, began = epoch(c), now()
    reject()
    await leader(c, after=first)
    assert now() - began < 0.2, "deposed, though it lives"
    assert len(leading(c)) == 1
    for rank, member in enumerate(members):
        member.arrive([rank])
    for member in members:
        assert (await member.outcome()).result == BARRIER_RESULT_RELEASED

    c.heal(old.name, follower)
    await c.ready()
    healed_at = now()
    while (current := leading(c)[0]) is not old:  # resign leaders until the deposed replica leads again
        await current.context.election.resign()
        await asyncio.sleep(0.5)
    again = epoch(c)
    reject()
    await asyncio.sleep(20)
    assert epoch(c) == again, "the follower that was wrong deposes nobody"
    c.heal(old.name, follower)
    await c.ready()
    await asyncio.sleep(healed_at + PEACE_S + 1 - now())
    reject()
    await leader(c, after=again)
    c.heal(old.name, follower)
    await c.ready()
    assert all(not member.over.is_set() for member in members)
    assert all(world.world.generation == 1 for m in members for world in m.all("world"))


@in_cluster(leader)
async def test_without_a_link_to_the_leader_in_this_epoch_its_lease_must_expire(
    c: Cluster, old: Node
) -> None:
    before = epoch(c)
    for other in THREE:
        if other != old.name:
            c.partition(old.name, other)
    await asyncio.sleep(1)
    began = now()
    old.kill()
    for other in THREE:
        if other != old.name:
            c.heal(old.name, other)
    await leader(c, after=before)
    assert now() - began > 4.0


@in_cluster(leader, replicas=1)
async def test_a_leader_that_reconnects_before_the_deposition_is_retried_stays_leader(
    c: Cluster, old: Node
) -> None:
    network = Scripted()
    await c.start("r2", network=network)
    before = epoch(c)
    network.begin()
    network.says = lambda call: Fate(delay_s=0.3, lost="request") if call.kind == "execute" else Fate()
    c.board.reject("r2", peer_address(old.name))
    c.board.reject(old.name, peer_address("r2"))
    while not network.executed:  # noqa: ASYNC110  # virtual
        await asyncio.sleep(0.01)
    c.heal("r2", old.name)
    while not c["r2"].service.peers.ready():  # noqa: ASYNC110  # virtual
        await asyncio.sleep(0.01)
    network.says = lambda _call: Fate()
    await asyncio.sleep(10)
    assert epoch(c) == before
