"""A replica loses etcd and all peers, but not its members: the members find another replica by themselves (5.5)."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from strata.client.member_session import MemberSession
from strata.core.kv.records import WorldHead, decode
from strata.core.kv.txn import Range
from strata.errors import StrataError, Unavailable
from strata.session.endpoints import parse_endpoints
from strata.testing.virtual_time import in_virtual_time
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import Hello, Up, Welcome
from strata.v1.worlds_pb2 import JobSpec
from tests.unit.coordinator.rig import in_rig
from tests.unit.coordinator.serving_rig import JOB, Cluster, cluster


class RankObserver:
    """An observer that records which replicas served the session, and each loss of it."""

    def __init__(self) -> None:
        self.replicas: list[str] = []
        self.lost: list[StrataError] = []

    def on_connected(self, welcome: Welcome) -> None:
        self.replicas.append(welcome.replica)

    def on_disconnected(self, reason: StrataError) -> None:
        self.lost.append(reason)

    def on_world(self, update: object) -> None: ...
    def on_outcome(self, outcome: object) -> None: ...
    def on_checkpoint(self, checkpoint: object) -> None: ...


async def session(
    c: Cluster, worker: str, seed: int, jobs: list[asyncio.Task[None]]
) -> tuple[MemberSession, RankObserver]:
    """Return a member's session as the library makes it, with all three endpoints, and its observer."""
    watcher = RankObserver()
    made = MemberSession(
        parse_endpoints("r1,r2,r3"),
        Registration(
            job="job",
            worker_id=worker,
            boot=f"boot-{worker}",
            slots=1,
            spec=JobSpec(min_workers=3, max_workers=3),
        ),
        watcher,
        rng=random.Random(seed),
        dial=lambda endpoint: cast("Any", c.board.dial(f"client-{worker}", endpoint.host)),
    )
    jobs.append(c.tasks.create_task(made.run()))
    await made.wait_connected()
    return made, watcher


async def world(c: Cluster, jobs: list[asyncio.Task[None]]) -> list[tuple[MemberSession, RankObserver]]:
    members = [await session(c, f"w{number}", number, jobs) for number in range(3)]
    await c["r1"].see(lambda view: view.get(JOB.head) is not None)
    return members


def is_whole(c: Cluster, members: list[tuple[MemberSession, RankObserver]]) -> None:
    for number, (member, _) in enumerate(members):
        held = c.worker(f"w{number}")
        assert held is not None, f"w{number} was declared dead"
        assert held.create_revision == member.incarnation
    assert decode(WorldHead, c.store.read(Range(key=JOB.head)).kvs[0].value).generation == 1


@pytest.mark.parametrize("leads", [False, True])
@in_virtual_time()
async def test_members_of_a_replica_that_lost_etcd_and_its_peers_go_to_another_in_time(leads: bool) -> None:
    jobs: list[asyncio.Task[None]] = []
    async with cluster() as c:
        leader = next(node.name for node in c.alive if node.context.election.epoch is not None)
        members = await world(c, jobs)
        sick = leader if leads else next(w.replicas[0] for _, w in members if w.replicas[0] != leader)
        mine = [(m, w) for m, w in members if w.replicas[0] == sick]
        if leads and not mine:
            pytest.skip("nobody is at the leader")
        c[sick].client.partition()
        for other in {"r1", "r2", "r3"} - {sick}:
            c.partition(sick, other)
        async with asyncio.timeout(7.0):
            for _, watcher in mine:
                while len(watcher.replicas) < 2:  # noqa: ASYNC110  # virtual
                    await asyncio.sleep(0.05)
        await asyncio.sleep(30)
        is_whole(c, members)
        assert all(len(watcher.replicas) <= 2 for _, watcher in members)
        c[sick].client.heal()
        for other in {"r1", "r2", "r3"} - {sick}:
            c.heal(sick, other)
        await c.ready()
        await asyncio.sleep(20)
        is_whole(c, members)
        for job in jobs:
            job.cancel()


@pytest.mark.parametrize("links", [True, False])
@in_rig(cluster)
async def test_no_stream_is_lost_when_all_replicas_lose_etcd(c: Cluster, links: bool) -> None:
    """This holds with and without `links` between the replicas."""
    jobs: list[asyncio.Task[None]] = []
    members, nodes = await world(c, jobs), c.all
    pairs = () if links else (("r1", "r2"), ("r1", "r3"), ("r2", "r3"))
    for node in nodes:
        node.client.partition()
    for pair in pairs:
        c.partition(*pair)
    await asyncio.sleep(40)
    for pair in pairs:
        c.heal(*pair)
    for node in nodes:
        node.client.heal()
    await c.ready()
    await asyncio.sleep(20)
    is_whole(c, members)
    assert [watcher.lost for _, watcher in members] == [[], [], []]
    for job in jobs:
        job.cancel()


@in_rig(cluster, members=1)
async def test_an_unready_replica_refuses_an_if_ready_hello_and_writes_nothing(c: Cluster) -> None:
    [served] = await c.world("r1")
    before = c.worker(served.worker)
    c["r2"].client.partition()
    await asyncio.sleep(3)
    registration = Registration(
        job="job", worker_id=served.worker, boot=served.boot, slots=1, incarnation=served.incarnation
    )
    async with c.board.dial("client-asking", "r2") as link:
        link.send(Up(hello=Hello(member=registration, if_ready=True)))
        with pytest.raises(Unavailable, match="not ready"):
            await link.recv()
    c["r2"].client.heal()
    await c.ready()
    await asyncio.sleep(10)
    assert c.worker(served.worker) == before
    assert not served.over.is_set()
