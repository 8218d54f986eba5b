"""A faulty replica (cut off from etcd, frozen, or without sessions) must remove no member (PROTOCOLS 5.5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from strata.core.kv.records import WorldHead, decode
from strata.core.kv.txn import Range
from strata.errors import Unavailable
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from strata.v1.members_pb2 import HeartbeatRequest, RegisterRequest, Registration
from tests.not_none import not_none
from tests.unit.coordinator.rig import in_rig, now
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, cluster, in_world

THREE = ("r1", "r2", "r3")


def same_generation(c: Cluster, members: Sequence[Member], incarnations: dict[str, int]) -> None:
    for member in members:
        entry = c.worker(member.worker)
        assert entry is not None, f"{member.worker} was declared dead"
        assert entry.create_revision == incarnations[member.worker]
    head = c.store.read(Range(key=JOB.head)).kvs[0]
    assert decode(WorldHead, head.value).generation == 1


async def follow(c: Cluster, member: Member) -> None:
    """Connect to the replica to which the serving replica redirects this member, as the library does."""
    moved = await member.next("moved")
    await member.connect(moved.addresses[0])


def incarnations(members: Sequence[Member]) -> dict[str, int]:
    return {member.worker: member.incarnation for member in members}


@in_world(*THREE)
async def test_a_replica_cut_off_from_etcd_sends_its_members_to_a_ready_one_in_time(
    c: Cluster, members: list[Member]
) -> None:
    before = incarnations(members)
    sick = c["r1"]
    mine = members[[m.worker for m in members].index("w0")]
    sick.client.partition()
    cut_at = now()
    await follow(c, mine)
    assert 1.9 <= now() - cut_at < 3.3
    await asyncio.sleep(20)
    same_generation(c, members, before)
    sick.client.heal()
    await c.ready()
    await asyncio.sleep(10)
    same_generation(c, members, before)
    for rank, member in enumerate(members):
        member.arrive([rank])
    for member in members:
        assert (await member.outcome()).result == BARRIER_RESULT_RELEASED


@in_rig(cluster, members=1)
async def test_a_member_registering_at_a_sick_replica_is_moved_to_another_one(c: Cluster) -> None:
    c["r1"].client.partition()
    mine = c.member("w0")
    mine.dial("r1")
    began = now()
    await follow(c, mine)
    assert now() - began < 3.3
    c["r1"].client.heal()
    await c.ready()
    await asyncio.sleep(20)
    assert not mine.over.is_set(), "what was begun at the sick one takes nobody back"
    same_generation(c, [mine], incarnations([mine]))


@in_world("r1", "r1", "r2")
async def test_a_stalled_replica_deletes_no_member_whose_stream_broke_meanwhile(
    c: Cluster, members: list[Member]
) -> None:
    before = incarnations(members)
    lost = [m for m in members if m.worker in {"w0", "w1"}]
    c["r1"].skew_s = 30.0  # the replica was frozen: all timers that expired meanwhile are due now
    for member in lost:
        member.drop()
    await asyncio.sleep(4.5)
    same_generation(c, members, before)
    for member in lost:
        await member.connect("r3")
    await asyncio.sleep(20)
    same_generation(c, members, before)


@in_rig(cluster)
async def test_a_dead_member_is_still_removed_after_a_clock_jump_of_its_replica(c: Cluster) -> None:
    await c.world(*THREE)
    c["r1"].skew_s = 30.0
    (await c.member("w9").connect("r1")).drop()
    began = now()
    await c["r2"].see(lambda view: view.get(JOB.worker("w9")) is not None)
    await c["r2"].see(lambda view: view.get(JOB.worker("w9")) is None)
    assert 4.5 < now() - began < 7


@in_rig(cluster, members=1)
async def test_a_stalled_leader_deletes_no_orphan(c: Cluster) -> None:
    leader = next(node for node in c.alive if node.context.election.epoch is not None)
    victim = next(node for node in c.alive if node is not leader)
    members = [orphan] = await c.world(victim.name)
    before = incarnations(members)
    victim.kill()
    await asyncio.sleep(7)  # its key has been missing for 4 s
    leader.skew_s = 2.0  # less than the time that ends its term
    await asyncio.sleep(3)
    assert c.worker(orphan.worker) is not None
    await orphan.connect(leader.name)
    await asyncio.sleep(20)
    same_generation(c, members, before)


@in_world(*("r1",) * 8, members=8)
async def test_many_sessions_broken_at_once_remove_no_member_for_five_seconds(
    c: Cluster, members: list[Member]
) -> None:
    before = incarnations(members)
    for member in members[:7]:
        member.drop()
    await asyncio.sleep(4.5)
    same_generation(c, members, before)
    for member in members[:7]:
        await member.connect("r2")
    await asyncio.sleep(20)
    same_generation(c, members, before)


@in_world("r1", "r1", "r2", "r3", members=4)
async def test_a_replica_without_peers_removes_no_member_for_a_few_broken_sessions(
    c: Cluster, members: list[Member]
) -> None:
    before = incarnations(members)
    lonely = members[:2]  # the two members at r1: ranks have the order of the names above
    c.partition("r1", "r2")
    c.partition("r1", "r3")
    await asyncio.sleep(2)
    for member in lonely:
        member.drop()
    await asyncio.sleep(2.5)
    for member in lonely:
        await member.connect("r2")
    await asyncio.sleep(20)
    same_generation(c, members, before)


@in_rig(cluster, members=1)
async def test_a_new_incarnation_waits_while_a_stalled_replica_deletes_no_member(c: Cluster) -> None:
    await c.world("r1")
    c["r1"].skew_s = 30.0
    c_members = c.member("w0", boot="another")
    c_members.dial("r1")
    old = not_none(c.worker("w0"))
    for made in c.made[:-1]:
        made.drop()
    await asyncio.sleep(4)
    assert not_none(c.worker("w0")).create_revision == old.create_revision
    await c_members.next("welcome")
    assert c_members.incarnation != old.create_revision


@in_rig(cluster, members=1)
async def test_an_unready_replica_refuses_heartbeats_and_another_accepts_them(c: Cluster) -> None:
    registration = Registration(job="job", worker_id="u", boot="boot-u")
    calls = c["r1"].service.calls
    answer = await calls.answer("register", RegisterRequest(registration=registration), None)
    beat = HeartbeatRequest(job="job", worker_id="u", boot="boot-u", incarnation=answer.incarnation)
    c["r1"].client.partition()
    sick_at = now()
    while now() - sick_at < 1.0:
        await calls.answer("heartbeat", beat, None)
        await asyncio.sleep(0.5)
    await asyncio.sleep(1.8)
    with pytest.raises(Unavailable, match="not ready"):
        await calls.answer("heartbeat", beat, None)
    while now() - sick_at < 20.0:
        await c["r2"].service.calls.answer("heartbeat", beat, None)
        await asyncio.sleep(1)
    assert not_none(c.worker("u")).create_revision == answer.incarnation
    c["r1"].client.heal()
    await c.ready()
