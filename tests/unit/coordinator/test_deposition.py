"""A dead leader is followed at once; one that lives, or may live, is not (PROTOCOLS 4.7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from strata.core.deposition import PEACE_S
from strata.core.records import Leader, decode
from strata.core.txn import Range
from strata.testing.network import Call, Fate, PromptNetwork
from strata.testing.serving import peer_door
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from tests.unit.coordinator.rig import in_rig, now
from tests.unit.coordinator.serving_rig import KEYS, Cluster, Member, Node, cluster, in_cluster, in_world

THREE = ("r1", "r2", "r3")


def epoch(c: Cluster) -> int:
    kvs = c.store.read(Range(key=KEYS.leader)).kvs
    return kvs[0].create_revision if kvs else 0


def leader_name(c: Cluster) -> str:
    kvs = c.store.read(Range(key=KEYS.leader)).kvs
    return decode(Leader, kvs[0].value).replica if kvs else ""


def leading(c: Cluster) -> list[Node]:
    return [node for node in c.alive if node.context.election.epoch is not None]


async def leader(c: Cluster, *, after: int = 0) -> Node:
    """Return who acts as leader in an epoch above `after`."""
    async with asyncio.timeout(30):
        while True:
            for node in leading(c):
                if (node.context.election.epoch or 0) > after:
                    return node
            await asyncio.sleep(0.001)


@in_cluster(leader)
async def test_after_a_kill_the_next_leader_acts_at_once(c: Cluster, old: Node) -> None:
    before, began = epoch(c), now()
    old.kill()
    await leader(c, after=before)
    assert 0.02 <= now() - began < 0.1
    assert len(leading(c)) == 1


@in_rig(cluster)
async def test_a_leader_killed_again_and_again_is_followed_each_time(c: Cluster) -> None:
    for _ in range(6):
        old = await leader(c)
        before, began = epoch(c), now()
        old.kill()
        await leader(c, after=before)
        assert now() - began < 0.1
        await c.start(old.name)


class Losing(PromptNetwork):
    """Loses every call of these kinds while it is told to."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.losing = False
        self.lost = 0

    def fate(self, call: Call) -> Fate:
        if self.losing and call.kind in self.kinds:
            self.lost += 1
            return Fate(lost="request")
        return Fate()


@pytest.mark.parametrize("kinds", [("grant",), ("execute",), ("grant", "execute")], ids="+".join)
@in_cluster(leader, replicas=1)
async def test_an_etcd_that_does_not_answer_at_that_moment_ends_no_follower(
    c: Cluster, old: Node, kinds: tuple[str, ...]
) -> None:
    network = Losing(*kinds)
    for name in ("r2", "r3"):
        c.add(name, network=network)
    await c.ready()
    before = epoch(c)
    network.losing = True
    old.kill()
    await asyncio.sleep(1.0)
    assert network.lost
    network.losing = False
    await leader(c, after=before)
    assert len(c.alive) == 2


@in_cluster(leader)
async def test_a_leader_that_resigns_is_not_deposed(c: Cluster, old: Node) -> None:
    before, began = epoch(c), now()
    old.replica.stop()
    await leader(c, after=before)
    assert now() - began < 0.05
    assert old.task is not None
    await old.task
    del c.nodes[old.name]


def stalled(c: Cluster, other: str, old: str) -> None:
    for link in c.board.links(other, peer_door(old)):
        link.stall()


def reset(c: Cluster, other: str, old: str) -> None:
    for link in c.board.links(other, peer_door(old)):
        link.break_off()


@pytest.mark.parametrize("cut", [stalled, Cluster.partition, reset])
@in_cluster(leader)
async def test_a_leader_that_others_do_not_hear_keeps_its_lease_while_its_port_answers(
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
async def test_refusals_where_nobody_died_cost_an_office_and_nothing_else_and_then_there_is_peace(
    c: Cluster, members: list[Member]
) -> None:
    old = await leader(c)
    follower = next(name for name in THREE if name != old.name)
    other = next(name for name in THREE if name not in {old.name, follower})

    def reject() -> None:
        c.board.reject(follower, peer_door(old.name))
        c.board.reject(old.name, peer_door(follower))

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
    while leader_name(c) != old.name:  # until the deposed one leads again, by resignations
        current = c[leader_name(c)]
        await current.context.election.resign()
        await asyncio.sleep(0.5)
    again = epoch(c)
    reject()
    await asyncio.sleep(20)
    assert epoch(c) == again, "the follower has deposed one within this minute"
    c.heal(old.name, follower)
    await c.ready()
    await asyncio.sleep(began + PEACE_S + 1 - now())
    reject()
    await leader(c, after=again)
    c.heal(old.name, follower)
    await c.ready()
    assert all(not member.over.is_set() for member in members)
    assert all(world.world.generation == 1 for m in members for world in m.all("world"))
    assert other


@in_cluster(leader)
async def test_without_a_link_in_this_epoch_the_lease_is_waited_for(c: Cluster, old: Node) -> None:
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


class SlowlyLosing(Losing):
    """As `Losing`, and its caller hears of each loss after a while."""

    def fate(self, call: Call) -> Fate:
        fate = super().fate(call)
        return Fate(lost="request", delay_s=0.3) if fate.lost else fate


@in_cluster(leader, replicas=1)
async def test_a_leader_that_shakes_hands_before_a_retry_is_not_deposed_after_all(
    c: Cluster, old: Node
) -> None:
    network = SlowlyLosing("execute")
    await c.start("r2", network=network)
    before = epoch(c)
    network.losing = True
    c.board.reject("r2", peer_door(old.name))
    c.board.reject(old.name, peer_door("r2"))
    while not network.lost:  # noqa: ASYNC110  # virtual
        await asyncio.sleep(0.01)
    c.heal("r2", old.name)
    while not c["r2"].service.peers.ready():  # noqa: ASYNC110  # virtual
        await asyncio.sleep(0.01)
    network.losing = False
    await asyncio.sleep(10)
    assert epoch(c) == before
