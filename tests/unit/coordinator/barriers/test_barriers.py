"""Barriers through three replicas, each with a fault that could lose an arrival or an outcome."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from strata.v1.barriers_pb2 import (
    BARRIER_RESULT_RELEASED,
    BARRIER_RESULT_TIMED_OUT,
    ListBarriersRequest,
)
from strata.v1.session_pb2 import Leave
from tests.not_none import not_none
from tests.unit.coordinator.rig import Moment, in_rig, now, writes
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, cluster, in_world

THREE = ("r1", "r2", "r3")


async def released(members: list[Member], round_: int = 1, name: str = "b") -> dict[int, bytes]:
    """Return the payloads of a round, after checking that every member received the same release."""
    outcomes = [await member.outcome(round_, name) for member in members]
    assert {o.result for o in outcomes} == {BARRIER_RESULT_RELEASED}
    assert len({o.SerializeToString(deterministic=True) for o in outcomes}) == 1, "all were told the same"
    return dict(outcomes[0].payloads)


@in_world(*THREE)
async def test_a_hundred_rounds_are_released_without_waiting_for_a_repetition(
    c: Cluster, members: list[Member]
) -> None:
    began = now()
    for round_ in range(1, 101):
        for offset in range(3):
            rank = (round_ + offset) % 3
            members[rank].arrive([rank], round_)
        await released(members, round_)
    assert now() - began < 100 * 0.06, "no round waited for the next repetition"


@in_rig(cluster, members=2)
async def test_one_message_for_all_ranks_of_a_member(c: Cluster) -> None:
    members = await c.world("r1", "r3", slots=4)
    members[0].arrive([0, 1, 2, 3], payloads=[b"a", b"", b"c", b""])
    members[1].arrive([4, 5])
    members[1].arrive([6, 7], payloads=[b"g", b"h"])
    assert await released(members) == {0: b"a", 2: b"c", 6: b"g", 7: b"h"}


# -- the death of a replica ------------------------------------------------------------------------


@pytest.mark.parametrize("victim", THREE)
@pytest.mark.parametrize("arrived", [0, 1, 2, 3])
@pytest.mark.parametrize("after_s", [0.0, 0.0002, 0.0013, 0.0016], ids="{:.4f}s".format)
@in_world(*THREE)
async def test_a_barrier_releases_although_a_replica_dies_at_any_point(
    c: Cluster, members: list[Member], victim: str, arrived: int, after_s: float
) -> None:
    for rank in range(arrived):
        members[rank].arrive([rank])
    await asyncio.sleep(after_s)
    c[victim].kill()
    lost = members[THREE.index(victim)]
    await lost.over.wait()
    await lost.connect(next(name for name in THREE if name != victim))
    for rank, member in enumerate(members):
        if member is lost or rank >= arrived:
            member.arrive([rank], age_ms=2)
    await released(members)
    assert [len(m.all("world")) for m in members] == [1, 1, 1], "no member died of it"


@in_rig(cluster, replicas=0)
async def test_the_writer_dies_with_its_commit_and_the_others_learn_the_outcome(c: Cluster) -> None:
    written = Moment(lambda call: writes(call, "/outcome"))
    for name in THREE:
        await c.start(name, network=written.network(partial(Cluster.kill, c, name)))
    members = await c.world(*THREE)
    for rank, member in enumerate(members):
        member.arrive([rank])
    await written.came.wait()
    for rank, member in enumerate(members):
        if not c[THREE[rank]].alive:
            await member.over.wait()
            await member.connect(c.alive[0].name)
            member.arrive([rank], age_ms=10)
    await released(members)


# -- forwarding ------------------------------------------------------------------------------------


@in_world(*THREE)
async def test_arrivals_are_forwarded_again_when_a_partition_heals(c: Cluster, members: list[Member]) -> None:
    for one, other in (("r1", "r2"), ("r1", "r3"), ("r2", "r3")):
        c.partition(one, other)
    for rank, member in enumerate(members):
        member.arrive([rank])
    await asyncio.sleep(10)
    assert all(m.all("outcomes") == [] for m in members), "nobody can know of all three"
    c.heal("r1", "r2")
    c.heal("r2", "r3")
    began = now()
    await released(members)
    assert now() - began < 3.0


@in_world("r1", "r2", "r2")
async def test_a_restarted_replica_receives_the_open_barriers(c: Cluster, members: list[Member]) -> None:
    await c["r3"].crash()
    members[0].arrive([0])
    members[1].arrive([1])
    await asyncio.sleep(3)
    await c.start("r3")
    assert [len(r.arrived) for r in c["r3"].service.barriers.open("job")] == [2]
    await members[2].connect("r3")
    members[2].arrive([2])
    await released(members)


@in_world(*THREE)
async def test_a_lost_forward_is_repeated_within_about_a_second(c: Cluster, members: list[Member]) -> None:
    for name in THREE:  # the first forwarded messages are lost, although every peer looks ready
        c[name].service.barriers.forwarding.send = lambda _arrivals: None
    for rank, member in enumerate(members):
        member.arrive([rank])
    await asyncio.sleep(0.5)
    assert all(m.all("outcomes") == [] for m in members)
    for name in THREE:
        c[name].service.barriers.forwarding.send = c[name].service.peers.forward
    began = now()
    await released(members)
    assert now() - began < 1.1


# -- refusals ----------------------------------------------------------------------------------------


async def refusal(member: Member) -> tuple[str, list[int]]:
    refused = await member.next("arrival_refused")
    return refused.error.code, list(refused.ranks)


@in_world(*THREE)
async def test_a_mismatched_arrival_is_refused_and_the_round_stays_open(
    c: Cluster, members: list[Member]
) -> None:
    members[0].arrive([0], participants=[0, 1])
    await asyncio.sleep(0.01)
    members[1].arrive([1], participants=[1, 2])
    code, ranks = await refusal(members[1])
    assert (code, ranks) == ("INVALID_ARGUMENT", [1])
    members[1].arrive([1], participants=[0, 1])
    await released(members[:2])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"ranks": [2]}, "REFUSED"),
        ({"ranks": [0, 1]}, "REFUSED"),
        ({"payloads": [b"x" * 5000]}, "QUOTA_EXCEEDED"),
        ({"round_": 0}, "INVALID_ARGUMENT"),
        ({"name": "a/b"}, "INVALID_ARGUMENT"),
        ({"generation": 7}, "REFUSED"),
        ({"participants": [0, 9]}, "INVALID_ARGUMENT"),
    ],
    ids=str,
)
@in_world("r1", "r1", replicas=1, members=2)
async def test_an_arrival_that_cannot_count_is_refused(
    c: Cluster, members: list[Member], change: dict[str, object], code: str
) -> None:
    arguments: dict[str, object] = {"ranks": [0], **change}
    members[0].arrive(**arguments)  # type: ignore[arg-type]  # a table of wrong ones
    assert (await refusal(members[0]))[0] == code
    assert list(c["r1"].service.barriers.open("job")) == []


@in_world("r1", "r2", members=2)
async def test_a_new_generation_ends_the_old_ones_barriers_without_a_write(
    c: Cluster, members: list[Member]
) -> None:
    members[0].arrive([0])
    await asyncio.sleep(0.05)
    newcomer = c.member("w9")
    members[1].send(leave=Leave(reason="test"))
    await members[1].over.wait()
    refused = await members[0].next("arrival_refused") if not members[0].all("outcomes") else None
    if refused is not None:
        assert refused.error.code == "STALE_GENERATION"
    await newcomer.connect("r3")
    generation = (await newcomer.next("world")).world.generation
    assert generation > 1
    late = len(members[0].all("arrival_refused"))
    members[0].arrive([0], name="late")
    stale = await members[0].next("arrival_refused", after=late)
    assert stale.error.code == "STALE_GENERATION"


# -- breaks ------------------------------------------------------------------------------------------


@in_world(*THREE)
async def test_a_timeout_ends_the_round_for_all_and_names_missing_ranks_and_phases(
    c: Cluster, members: list[Member]
) -> None:
    members[2].send(progress={"generation": 1, "ranks": [{"rank": 2, "step": 41, "phase": "validating"}]})
    await asyncio.sleep(2)
    began = now()
    members[0].arrive([0], timeout_ms=3000)
    members[1].arrive([1], timeout_ms=8000)
    outcomes = [await m.outcome() for m in members[:2]]
    assert {o.result for o in outcomes} == {BARRIER_RESULT_TIMED_OUT}
    assert list(outcomes[0].missing) == [2]
    assert "validating" in outcomes[0].reason
    assert 2.9 < now() - began < 3.3
    members[2].arrive([2])
    assert (await members[2].outcome()).result == BARRIER_RESULT_TIMED_OUT
    for rank, member in enumerate(members):
        member.arrive([rank], round_=2)
    await released(members, 2)


@in_world(*THREE)
async def test_an_arrival_keeps_its_age_over_a_reconnect(c: Cluster, members: list[Member]) -> None:
    members[0].arrive([0], timeout_ms=5000)
    await asyncio.sleep(2)
    await c["r1"].crash()
    await members[0].connect("r2")
    members[0].arrive([0], timeout_ms=5000, age_ms=2000)
    began = now()
    assert (await members[0].outcome()).result == BARRIER_RESULT_TIMED_OUT
    assert 2.9 < now() - began < 3.3


@in_world(*THREE)
async def test_the_counter_is_visible_while_a_barrier_stays_open(c: Cluster, members: list[Member]) -> None:
    members[0].arrive([0])
    members[1].arrive([1])
    await c["r1"].see(lambda view: view.get(JOB.arrived("b", 1, 1)) is not None)
    writes = c["r1"].view.revision
    await asyncio.sleep(4.0)
    arrived = not_none(c["r1"].view.get(JOB.arrived("b", 1, 1)))
    assert b'"missing":[2]' in arrived.value
    assert arrived.version <= 2, "nothing new, nothing written"
    assert c["r1"].view.revision - writes < 10
    listed = await c["r3"].service.calls.answer("list_barriers", ListBarriersRequest(job="job"), None)
    assert [(o.name, o.arrived, o.expected, list(o.missing)) for o in listed.open] == [("b", 2, 3, [2])]
