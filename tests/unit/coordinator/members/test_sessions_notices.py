"""Stop notices on sessions: the requesting member, the members that receive one, and the answers to a request."""

from __future__ import annotations

import asyncio
from typing import Any

from strata.core.stop.last_step import BEGIN_BARRIER
from strata.v1 import worlds_pb2
from strata.v1.session_pb2 import Leave, RankExit, WorldUpdate
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, in_world
from tests.unit.core.rig import release

PREEMPT, PAUSE, DRAIN = (
    worlds_pb2.STOP_ACTION_PREEMPT,
    worlds_pb2.STOP_ACTION_PAUSE,
    worlds_pb2.STOP_ACTION_DRAIN,
)


def begun(c: Cluster) -> None:
    """Release the barrier before the first step: without it the leader waits for no rank at a stop."""
    c.store.execute(release(JOB, BEGIN_BARRIER))


async def asks(member: Member, action: int, **more: Any) -> worlds_pb2.StopNotice:
    reply = await member.call(stop_job={"action": action, "reason": "why", "grace_ms": 5000, **more})
    assert reply.HasField("stop_job"), reply
    return reply.stop_job.notice


async def reported(member: Member) -> WorldUpdate:
    """Return this member's first update with a notice."""

    def found() -> list[WorldUpdate]:
        return [update for update in member.all("world") if update.HasField("notice")]

    updates: list[WorldUpdate] = await member.until(found)
    return updates[0]


async def stops(member: Member, rank: int, *, generation: int = 1) -> None:
    number = 500 + rank
    member.send(rank_exit=RankExit(generation=generation, rank=rank, code=75, id=number))
    await member.until(lambda: [reply for reply in member.all("reply") if reply.id == number])


@in_world("r1", "r2", "r3")
async def test_a_preemption_notice_reaches_all_current_members_and_no_newcomer(
    c: Cluster, members: list[Member]
) -> None:
    begun(c)
    standby = await c.member("w8").connect("r1")
    notice = await asks(members[1], PREEMPT)
    assert (notice.generation, notice.action, notice.grace_ms) == (1, PREEMPT, 5000)
    for member in (*members, standby):
        update = await reported(member)
        assert (update.notice.generation, update.notice.reason) == (1, "why")
    newcomer = await c.member("w9").connect("r2")
    assert not (await newcomer.world()).HasField("notice"), "it came after the notice"
    again = await asks(members[2], PREEMPT)
    assert (again.action, again.reason, again.pause) == (PREEMPT, "why", False), "the first one holds"
    for rank, member in enumerate(members):
        await stops(member, rank)
    for member in (*members, standby):
        update = await member.world(2)
        assert update.world.forming
        assert update.notice.action == PREEMPT, "it shall still leave"
    assert not (await newcomer.world(2)).HasField("notice")
    await members[0].connect("r3")
    assert (await members[0].world(2)).HasField("notice"), "whoever serves it says so"
    for member in (*members, standby):
        member.send(leave=Leave(reason="as asked"))
        await member.over.wait()
    others = [await c.member(f"n{number}").connect("r1") for number in range(2)]
    for member in (newcomer, *others):
        update = await member.world(3)
        assert update.HasField("place")
        assert not update.HasField("notice")


@in_world("r1", "r2", "r3")
async def test_a_drain_notice_reaches_all_ranks_and_later_only_the_drained_member(
    c: Cluster, members: list[Member]
) -> None:
    standby = await c.member("w8").connect("r1")
    await standby.world()
    begun(c)
    await asks(members[0], DRAIN, worker_ids=[members[2].worker])
    for member in members:
        assert list((await reported(member)).notice.worker_ids) == [members[2].worker]
    await stops(members[2], 2)
    for member in (*members[:2], standby):
        update = await member.world(2)
        assert update.HasField("place")
        assert not update.HasField("notice")
    left_out = await members[2].world(2)
    assert (left_out.HasField("place"), left_out.notice.action) == (False, DRAIN)
    assert all(not update.HasField("notice") for update in standby.all("world"))


@in_world("r1", "r2", "r3")
async def test_a_pause_notice_reaches_all_members_and_requires_none_to_leave(
    c: Cluster, members: list[Member]
) -> None:
    begun(c)
    await asks(members[0], PAUSE)
    for rank, member in enumerate(members):
        assert (await reported(member)).notice.action == PAUSE
        await stops(member, rank)
    for member in members:
        update = await member.world(2)
        assert (update.phase, update.world.forming) == (worlds_pb2.JOB_PHASE_PAUSED, True)
        assert update.phase_reason == "paused: why"
        assert not update.HasField("notice")
    await asyncio.sleep(30)
    assert all(update.world.generation <= 2 for update in members[0].all("world"))


@in_world("r1", "r2", "r3")
async def test_a_refused_stop_request_is_answered_with_its_error_and_writes_no_notice(
    c: Cluster, members: list[Member]
) -> None:
    reply = await members[0].call(stop_job={"action": DRAIN, "worker_ids": ["nobody"]})
    assert reply.error.code == "NOT_FOUND"
    reply = await members[0].call(stop_job={"action": PREEMPT, "generation": 7})
    assert reply.error.code == "STALE_GENERATION"
    reply = await members[0].call(stop_job={"action": 0})
    assert reply.error.code == "INVALID_ARGUMENT"
    reply = await members[0].call(list_generations={})
    assert [each.world.generation for each in reply.list_generations.generations] == [1]
    assert c["r1"].view.get(JOB.notice(1)) is None
