"""A replica that is cut off from etcd, or wakes after a freeze, must remove no member (PROTOCOLS 5.5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from strata.devcluster.etcd_cluster import EtcdCluster
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from tests.integration.gate import gated
from tests.integration.replicas import LIMIT_S, Replicas, started
from tests.raw_member import Member

ORPHANED_S = 9.0
"""The leader deletes a replica's members after this time without a renewal."""
SPARED_S = 7.0
"""Longer than the sum of the grace and the time in which a woken replica deletes no member."""


async def meet(members: Sequence[Member], round_: int) -> None:
    """Assert that all members are still in the first generation and meet at a barrier."""
    for rank, member in enumerate(members):
        await member.world()
        assert not member.over.is_set(), member.error
        assert {update.world.generation for update in member.all("world")} == {1}
        member.arrive([rank], round_)
    for member in members:
        assert (await member.outcome(round_)).result == BARRIER_RESULT_RELEASED


def of_replica(replicas: Replicas, address: str) -> str:
    return next(name for name in replicas.names if replicas[name].address == address)


@pytest.mark.slow
async def test_a_replica_cut_off_from_etcd_has_its_members_served_elsewhere(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with (
        gated(etcd.endpoints[0]) as gate,
        started(etcd, "cut-off", tmp_path, ways={"r1": gate.address}) as replicas,
    ):
        members = await replicas.world("r1", "r2", "r3")
        await meet(members, 1)
        mine = next(member for member in members if member.worker == "w0")
        incarnation = mine.incarnation
        gate.shut()
        shut_at = time.monotonic()
        moved = await mine.next("moved")
        assert time.monotonic() - shut_at < ORPHANED_S - 2
        await mine.connect(of_replica(replicas, moved.addresses[0]))
        assert mine.incarnation == incarnation
        await meet(members, 2)
        await asyncio.sleep(max(0.0, shut_at + ORPHANED_S + 2 - time.monotonic()))
        await meet(members, 3)
        gate.open()
        await replicas.ready()
        await asyncio.sleep(SPARED_S)
        await meet(members, 4)


@pytest.mark.slow
async def test_a_frozen_replica_that_wakes_deletes_none_of_its_former_members(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with started(etcd, "frozen-wakes", tmp_path) as replicas:
        leader = await replicas.leader()
        frozen, other = (name for name in replicas.names if name != leader)
        members = await replicas.world(frozen, other, leader)
        await meet(members, 1)
        mine = next(member for member in members if member.worker == "w0")
        incarnation = mine.incarnation
        replicas[frozen].child.pause()
        await mine.connect(other)  # as the library does after 3 s without a tick
        assert mine.incarnation == incarnation
        await asyncio.sleep(3.5)  # by now the replica's key has expired, and its orphans are removed
        await meet(members, 2)
        replicas[frozen].child.resume()
        async with asyncio.timeout(LIMIT_S):
            await replicas.ready()
        await asyncio.sleep(SPARED_S)
        await meet(members, 3)
