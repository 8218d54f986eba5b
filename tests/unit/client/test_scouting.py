"""A session whose replica says that it is not ready, and knows nobody who is (PROTOCOLS 5.5)."""

from __future__ import annotations

import asyncio

from strata import errors
from strata.testing.links import host_of
from tests.unit.client.fake_replica import FakeReplica, Rig, rig
from tests.unit.coordinator.rig import in_rig


def now() -> float:
    return asyncio.get_running_loop().time()


def unready(replica: FakeReplica) -> None:
    """Let a replica say so, and refuse who asks whether it is ready."""
    replica.ready = False
    replica.refuse_hello = errors.Unavailable("this replica is not ready")


async def first_unready_tick(r: Rig) -> None:
    unready(r.serving)
    await asyncio.sleep(1.0)


@in_rig(rig, 3)
async def test_a_black_hole_among_the_endpoints_costs_less_than_a_second(r: Rig) -> None:
    frozen, well = r.others
    frozen.board.block("client", host_of(frozen.address))
    began = now()
    await first_unready_tick(r)
    assert await r.reconnected(2) is well
    assert now() - began < 4.0


@in_rig(rig, 3)
async def test_when_no_replica_is_ready_the_stream_stays_and_the_tries_are_few(r: Rig) -> None:
    link = r.serving.links[-1]
    for replica in r.replicas:
        unready(replica)
    await asyncio.sleep(300)
    assert r.session.connected
    assert not link.over
    assert r.observer.troubles == []
    assert 150 < sum(len(other.hellos) for other in r.others) < 300
    assert len(r.serving.hellos) == 1
    r.serving.ready = True
    await asyncio.sleep(2)
    tried = [len(other.hellos) for other in r.others]
    for other in r.others:
        other.refuse_hello = None
    await asyncio.sleep(60)
    assert [len(other.hellos) for other in r.others] == tried, "who is served well looks nowhere"
    assert not link.over


@in_rig(rig, 2)
async def test_a_replica_that_dies_while_its_member_looks_is_left_as_ever(r: Rig) -> None:
    before, [other] = r.serving, r.others
    other.welcoming = False
    await first_unready_tick(r)
    await asyncio.sleep(2.5)
    other.welcoming = True
    before.down()
    assert await r.reconnected(2) is other
    assert not other.hellos[-1].if_ready


@in_rig(rig, 3)
async def test_a_look_whose_hello_is_out_is_not_given_up_when_the_first_replica_is_ready_again(
    r: Rig,
) -> None:
    """The other one may have the key by now: without a transport it would delete it after the grace."""
    before = r.serving
    for other in r.others:
        other.welcoming = False
    await first_unready_tick(r)
    while not any(other.hellos for other in r.others):  # noqa: ASYNC110  # virtual
        await asyncio.sleep(0.01)
    [asked] = [other for other in r.others if other.hellos]
    before.ready = True
    await asyncio.sleep(1.5)
    asked.welcome(asked.links[-1])
    assert await r.reconnected(2) is asked
    await asyncio.sleep(30)
    assert [len(other.hellos) for other in r.replicas].count(1) == 2, "nobody else was asked"


@in_rig(rig, 6)
async def test_whoever_has_the_hello_is_asked_first_when_the_first_replica_lets_go(r: Rig) -> None:
    """It lets go because the other one has taken the key, and says so before that one's welcome comes."""
    before = r.serving
    for other in r.others:
        other.welcoming = False
    await first_unready_tick(r)
    while not any(other.hellos for other in r.others):  # noqa: ASYNC110  # virtual
        await asyncio.sleep(0.01)
    [asked] = [other for other in r.others if other.hellos]
    for other in r.others:
        other.welcoming = True
    before.down()
    assert await r.reconnected(2) is asked


@in_rig(rig, 3)
async def test_a_look_ends_when_the_first_replica_is_ready_again_and_the_one_asked_says_nothing(
    r: Rig,
) -> None:
    link = r.serving.links[-1]
    for other in r.others:
        other.welcoming = False
    await first_unready_tick(r)
    await asyncio.sleep(2.5)
    r.serving.ready = True
    await asyncio.sleep(60)
    assert sum(len(other.hellos) for other in r.others) == 1
    assert not link.over


@in_rig(rig, 2)
async def test_the_one_that_was_found_may_become_unready_as_well(r: Rig) -> None:
    before = r.serving
    await first_unready_tick(r)
    after = await r.reconnected(2)
    assert after is not before
    before.ready, before.refuse_hello = True, None
    unready(after)
    assert await r.reconnected(3) is before


@in_rig(rig, 2)
async def test_leaving_while_a_look_is_under_way_ends_the_session(r: Rig) -> None:
    [other] = r.others
    other.welcoming = False
    await first_unready_tick(r)
    await asyncio.sleep(2.5)
    leaving = asyncio.create_task(r.session.leave())
    await asyncio.sleep(0.1)
    r.serving.links[-1].close()
    await leaving
    await r.running
