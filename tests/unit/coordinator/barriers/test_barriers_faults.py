"""Barriers with late views, departed members and refused writes: the cases of the secondary barrier rules."""

from __future__ import annotations

import asyncio
from typing import Any

from strata.core.kv.txn import Txn
from strata.errors import QuotaExceeded
from strata.testing.network import Fate
from strata.v1.barriers_pb2 import (
    BARRIER_RESULT_BROKEN,
    BARRIER_RESULT_RELEASED,
    Arrival,
)
from tests.not_none import not_none
from tests.unit.coordinator.rig import Scripted, in_rig, now
from tests.unit.coordinator.serving_rig import KEYS, Cluster, Member, cluster, in_world

THREE = ("r1", "r2", "r3")


async def meet(members: list[Member], *, generation: int = 1, round_: int = 1, name: str = "b") -> float:
    """Let every member arrive for its rank; return the seconds until all were released."""
    began = now()
    for member in members:
        place = (await member.world(generation)).place
        member.arrive([place.first_rank], round_, generation=generation, name=name)
    for member in members:
        assert (await member.outcome(round_, name)).result == BARRIER_RESULT_RELEASED
    return now() - began


@in_rig(cluster, 2, members=2)
async def test_a_replica_with_a_late_view_delays_no_barrier(c: Cluster) -> None:
    await c.start("r9", network=Scripted(watch_s=0.2))
    members = await c.world("r1", "r2")
    began = now()
    for rank, member in enumerate(members):
        member.arrive([rank])
    await members[0].outcome()
    assert now() - began < 0.1


@in_world(*THREE)
async def test_a_barrier_begun_after_a_death_breaks_even_without_a_leader(
    c: Cluster, members: list[Member]
) -> None:
    leader = next(node for node in c.alive if node.context.election.epoch is not None)
    others = [name for name in THREE if name != leader.name]
    for rank, member in enumerate(members):
        await member.connect(others[rank % 2])
    for other in others:
        c.partition(leader.name, other)  # no peer notices the leader's death, so its lease must expire
    leader.kill()
    members[2].drop()
    await asyncio.sleep(2.0)
    assert c.worker(members[2].worker) is None
    began = now()
    members[0].arrive([0])
    outcome = await members[0].outcome()
    assert outcome.result == BARRIER_RESULT_BROKEN
    assert list(outcome.missing) == [1, 2]
    assert now() - began < 0.2


def written(network: Scripted, part: str) -> int:
    """Return the number of attempts to write a key whose name contains `part`."""
    txns = [call.argument for call in network.calls if isinstance(call.argument, Txn)]
    return sum(any(part in op.key for op in txn.success) for txn in txns)


@in_rig(cluster, 0)
async def test_one_replica_writes_an_outcome_and_the_others_wait_for_their_turn(c: Cluster) -> None:
    network = Scripted(lambda _call: Fate(delay_s=0.002))
    await c.start(*THREE, network=network)
    members = await c.world(*THREE)
    for round_ in range(1, 31):
        await meet(members, round_=round_)
    assert written(network, "/outcome") == 30


@in_rig(cluster, 0)
async def test_only_one_replica_writes_the_arrival_counter(c: Cluster) -> None:
    network = Scripted(lambda _call: Fate(delay_s=0.002))
    await c.start(*THREE, network=network)
    members = await c.world(*THREE)
    members[0].arrive([0])
    await asyncio.sleep(3)
    assert written(network, "/arrived") == 1


@in_world("r1", "r1", "r2")
async def test_an_arrival_is_forwarded_before_the_replicas_other_ranks_arrive(
    c: Cluster, members: list[Member]
) -> None:
    members[0].arrive([0])
    await asyncio.sleep(0.01)
    for name in ("r2", "r3"):
        assert [len(r.arrived) for r in c[name].service.barriers.open("job")] == [1]


@in_world(*["r1"] * 39, "r2", members=40)
async def test_arrivals_that_come_together_are_forwarded_together(c: Cluster, members: list[Member]) -> None:
    sent: list[int] = []
    forwarding = c["r1"].service.barriers.forwarding
    forward = forwarding.send

    def counting(arrivals: list[Arrival]) -> None:
        sent.append(len(arrivals))
        forward(arrivals)

    forwarding.send = counting
    here = [m for m in members if m.worker != "w39"]
    for member in here:
        member.arrive([(await member.world()).place.first_rank])
    await asyncio.sleep(0.02)
    assert len(sent) <= 2


@in_world("r1", replicas=1, members=1)
async def test_an_outcome_that_could_not_be_written_is_tried_again(c: Cluster, members: list[Member]) -> None:
    executor = c["r1"].context.executor
    settle = executor.settle
    refusals = iter([True, True])

    async def full(*arguments: Any, **options: Any) -> None:
        if next(refusals, False):
            raise QuotaExceeded("etcd is full")
        await settle(*arguments, **options)

    executor.settle = full  # type: ignore[method-assign]  # a store that is full for a while
    took_s = await meet(members)
    assert 0.5 < took_s < 3.0


@in_world("r1", "r2", members=2)
async def test_a_record_by_hand_spoils_its_own_jobs_barriers_and_no_replica(
    c: Cluster, members: list[Member]
) -> None:
    members[0].arrive([0], timeout_ms=2000)
    await asyncio.sleep(0.05)
    spoilt = KEYS.job("job").worker(members[1].worker)
    held = not_none(c["r1"].view.get(spoilt))
    c.put(spoilt, b"written by hand")
    await asyncio.sleep(5)
    assert [node.name for node in c.alive] == ["r1", "r2", "r3"]
    c.put(spoilt, held.value)
    await members[0].outcome()
