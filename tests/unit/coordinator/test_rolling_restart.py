"""Replicas stop and start in turn, under load: no barrier fails, and no generation ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from strata.core.kv.records import WorldHead, decode
from strata.core.kv.txn import Range
from strata.errors import Unavailable
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from tests.not_none import not_none
from tests.unit.coordinator.rig import in_rig, now, slow_writes
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, cluster, in_world

THREE = ("r1", "r2", "r3")


MEMBERS = 6


class Load:
    """Members that meet again and again, and reconnect where a stopping replica sends them."""

    def __init__(self, c: Cluster, members: list[Member]) -> None:
        self.members = members
        self.rounds = 0
        self.longest_s = 0.0
        self._cluster = c

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for member in self.members:
                tasks.create_task(self._follow(member))
            while True:
                await self._round(self.rounds + 1)
                await asyncio.sleep(0.25)

    async def _round(self, number: int) -> None:
        began = now()
        await asyncio.gather(*(self._meet(rank, m, number) for rank, m in enumerate(self.members)))
        self.rounds = number
        self.longest_s = max(self.longest_s, now() - began)

    async def _meet(self, rank: int, member: Member, number: int) -> None:
        while True:
            if member.link is not None and member.all("welcome"):
                member.arrive([rank], number)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    outcome = await member.outcome(number)
                    assert outcome.result == BARRIER_RESULT_RELEASED
                    return

    async def _follow(self, member: Member) -> None:
        while True:
            await member.over.wait()
            moved = member.all("moved")
            assert moved, f"{member.worker} lost its stream: {member.error}"
            assert moved[0].addresses
            await asyncio.sleep(0.02)
            await member.connect(moved[0].addresses[0])


@in_world(*THREE * 2, members=MEMBERS)
async def test_a_rolling_restart_fails_no_barrier_and_ends_no_generation(
    c: Cluster, members: list[Member]
) -> None:
    before = {member.worker: member.incarnation for member in members}
    load = Load(c, members)
    running = c.tasks.create_task(load.run())
    for name in THREE:
        await asyncio.sleep(2)
        rounds = load.rounds
        node = c[name]
        node.replica.stop()
        assert node.task is not None
        await node.task
        await asyncio.sleep(2)
        assert load.rounds > rounds + 5
        await c.start(name)
    await asyncio.sleep(7)
    running.cancel()
    assert load.longest_s < 0.5
    head = c.store.read(Range(key=JOB.head)).kvs[0]
    assert decode(WorldHead, head.value).generation == 1
    for member in members:
        assert not_none(c.worker(member.worker)).create_revision == before[member.worker]


@in_rig(cluster, 2, members=1)
async def test_a_member_registering_at_a_stopping_replica_is_moved_at_once(c: Cluster) -> None:
    await c.start("r3", network=slow_writes(0.3))
    began = now()
    member = c.member("w0")
    member.dial("r3")
    await asyncio.sleep(0.1)
    c["r3"].service.part()
    moved = await member.next("moved")
    assert set(moved.addresses) == {"r1", "r2"}
    assert now() - began < 0.5
    late = c.member("w1")
    late.dial("r3")
    await late.over.wait()
    assert isinstance(late.error, Unavailable)
    assert c.worker("w1") is None
