"""Which replica serves a session: when the session leaves a replica, and how soon another serves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from strata import errors
from strata.testing.links import MemoryLink, host_of
from strata.testing.virtual_time import VirtualTimeLoop, in_virtual_time
from strata.v1.session_pb2 import Down, Moved
from strata.v1.worlds_pb2 import GetWorldRequest
from tests.unit.client.fake_replica import FakeReplica, Rig, arrival, done, rig
from tests.unit.coordinator.rig import in_rig


@in_rig(rig, 3)
async def test_a_lost_replica_is_left_for_another_within_100_ms(r: Rig) -> None:
    before, lost_at = r.serving, asyncio.get_running_loop().time()
    before.down()
    now = await r.reconnected(2)
    assert now is not before
    assert now.hello_times[-1] - lost_at < 0.1
    assert r.session.connected


@in_rig(rig, 3)
async def test_a_replica_that_does_not_answer_is_not_waited_for_while_another_may(r: Rig) -> None:
    """The lost replica waits one second of grace, and the member must be back within this second."""
    before = r.serving
    frozen, well = r.others
    frozen.board.block("client", host_of(frozen.address))
    before.ready_addresses = [frozen.address]
    await asyncio.sleep(1.1)  # a tick has named the replica to go to
    lost_at = asyncio.get_running_loop().time()
    before.board.block("client", host_of(before.address))
    before.down()
    assert await r.reconnected(2) is well
    assert well.hello_times[-1] - lost_at < 1.0


@in_rig(rig, 3)
async def test_a_session_survives_30_s_without_coordinators(r: Rig) -> None:
    waiting = r.session.arrive(arrival())
    call = asyncio.create_task(r.session.call(GetWorldRequest(job="j"), timeout_s=None))
    for replica in r.replicas:
        replica.answer = done
        replica.down()
    await asyncio.sleep(30)
    assert not r.session.connected
    assert 30 <= len(r.observer.disconnections) <= 80
    for replica in r.replicas:
        replica.up()
    up_at = asyncio.get_running_loop().time()
    now = await r.reconnected(2)
    assert now.hello_times[-1] - up_at <= 2.1
    assert now.hellos[-1].member.incarnation == 7
    again = await now.next("arrivals")
    assert 29_000 < again.arrivals[0].age_ms < 33_000
    now.release(again.arrivals[0])
    await waiting
    await call


@in_virtual_time()
@pytest.mark.parametrize("silent", [False, True], ids=["the others refuse", "the others are black holes"])
@pytest.mark.parametrize("back", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_a_session_finds_the_first_returning_replica_in_time(
    seed: int, back: int, silent: bool
) -> None:
    """The lost replica's list of ready replicas may be outdated: one replica alone may return, and lead.

    From its return on, this replica deletes members that no replica has served for 5 s (PROTOCOLS 5.4).
    """
    async with rig(3, seed=seed) as r:
        for replica in r.replicas:
            replica.ready_addresses = [x.address for x in r.replicas if x is not replica]
        await asyncio.sleep(1.1)  # a tick has delivered the list
        alone = (r.serving, *r.others)[back]
        for replica in r.replicas:
            if silent and replica is not alone:
                replica.board.block("client", host_of(replica.address))
            replica.down()
        await asyncio.sleep(30.0)
        alone.up()
        up_at = asyncio.get_running_loop().time()
        assert await r.reconnected(2) is alone
        assert alone.hello_times[-1] - up_at < 4.2


@in_virtual_time()
@pytest.mark.parametrize("seed", range(6))
async def test_a_moved_message_leads_to_an_immediate_reconnect(seed: int) -> None:
    async with rig(3, seed=seed) as r:
        target, before = r.others[seed % 2], r.serving
        moved_at = asyncio.get_running_loop().time()
        before.send(Down(moved=Moved(addresses=[target.address], reason="draining")))
        assert await r.reconnected(2) is target
        assert target.hello_times[-1] - moved_at < 0.1


@pytest.mark.parametrize(
    ("refusal", "final"),
    [
        (errors.Unavailable("later"), False),
        (errors.NotLeader("not me"), False),
        (errors.QuotaExceeded("etcd is full"), False),
        (errors.StrataError("a bug"), False),
        (errors.OutcomeUnknown("?"), False),
        (errors.ConfigError("a stranger's port"), False),
        (errors.StaleIncarnation("replaced"), True),
        (errors.Refused("the job is done"), True),
        (errors.JobFailed("failed"), True),
        (errors.ClusterReplaced("other"), False),
        (errors.ClusterRestored("since then"), True),
    ],
)
@in_rig(rig, 2)
async def test_only_final_refusals_end_a_session_that_was_served_before(
    r: Rig, refusal: errors.StrataError, final: bool
) -> None:
    for replica in r.replicas:
        replica.refuse_hello = refusal
    r.serving.down()
    r.serving.up()
    await asyncio.sleep(20)
    assert r.running.done() is final
    if final:
        with pytest.raises(type(refusal)):
            r.running.result()
    else:
        for replica in r.replicas:
            replica.refuse_hello = None
        await r.reconnected(2)


@in_rig(rig, 2)
async def test_a_silent_replica_is_kept_if_no_other_is_ready(r: Rig) -> None:
    r.others[0].refuse_hello = errors.Unavailable("this replica is not ready")
    r.serving.ticking = False
    await asyncio.sleep(300)
    assert len(r.observer.connected) == 1
    assert r.session.connected


@in_rig(rig, 3)
async def test_a_silent_replica_that_named_no_other_is_left_for_a_ready_one(r: Rig) -> None:
    """The replica may have frozen before it knew of others, and its members soon become orphans."""
    before, there = r.serving, r.others[0]
    r.others[1].refuse_hello = errors.Unavailable("this replica is not ready")
    before.ready_addresses = []
    await asyncio.sleep(2.5)
    before.ticking = False
    silent_at = asyncio.get_running_loop().time()
    assert await r.reconnected(2) is there
    assert there.hellos[-1].if_ready
    assert 2.0 <= there.hello_times[-1] - silent_at <= 4.0
    assert "is silent, and" in r.observer.disconnections[-1].message


@in_rig(rig, 3)
async def test_a_session_welcomed_by_another_replica_stops_probing(
    r: Rig,
) -> None:
    """A second probe would take the session away from the replica that has just welcomed it."""
    before = r.serving
    before.board.block("client", host_of(before.address))
    before.ticking = False
    there = await r.reconnected(2)
    await asyncio.sleep(10)
    assert r.serving is there
    assert len(r.observer.connected) == 2
    assert sum(len(replica.hellos) for replica in r.replicas) == 2


@in_rig(rig, 2)
async def test_a_stall_of_the_client_is_not_blamed_on_the_replica(r: Rig) -> None:
    for replica in r.replicas:
        replica.ready_addresses = [x.address for x in r.replicas]
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    for _ in range(5):
        await asyncio.sleep(1.7)
        loop.suspend(30)
    assert len(r.observer.connected) == 1


@in_rig(rig, 2)
async def test_a_replica_that_never_welcomes_is_left(r: Rig) -> None:
    mute = r.others[0]
    mute.welcoming = mute.ticking = False
    r.serving.down()
    r.serving.up()
    now = await r.reconnected(2)
    assert now is not mute
    assert len(mute.hellos) == 1


# -- a session whose replica reports itself unready, and knows no ready one (PROTOCOLS 5.5)


def now() -> float:
    return asyncio.get_running_loop().time()


def unready(replica: FakeReplica) -> None:
    """Make a replica report itself unready, and refuse each hello that requires a ready replica."""
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
async def test_without_a_ready_replica_the_stream_is_kept_and_retries_are_rare(r: Rig) -> None:
    link = r.serving.links[-1]
    for replica in r.replicas:
        unready(replica)
    await asyncio.sleep(300)
    assert r.session.connected
    assert not link.over
    assert r.observer.disconnections == []
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
async def test_a_session_leaves_a_replica_that_dies_during_its_probe(r: Rig) -> None:
    before, [other] = r.serving, r.others
    other.welcoming = False
    await first_unready_tick(r)
    await asyncio.sleep(2.5)
    other.welcoming = True
    before.down()
    assert await r.reconnected(2) is other
    assert not other.hellos[-1].if_ready


@in_rig(rig, 3)
async def test_a_probe_with_a_sent_hello_continues_after_the_first_replica_recovers(
    r: Rig,
) -> None:
    """The probed replica may serve the member by now.

    If the transport were closed, the replica would delete the key after the grace.
    """
    before = r.serving
    for other in r.others:
        other.welcoming = False
    await first_unready_tick(r)
    while not any(other.hellos for other in r.others):  # noqa: ASYNC110  # virtual
        await asyncio.sleep(0.01)
    [probed] = [other for other in r.others if other.hellos]
    before.ready = True
    await asyncio.sleep(1.5)
    probed.welcome(probed.links[-1])
    assert await r.reconnected(2) is probed
    await asyncio.sleep(30)
    assert [len(other.hellos) for other in r.replicas].count(1) == 2, "nobody else was asked"


@in_rig(rig, 6)
async def test_a_replica_with_a_pending_hello_is_tried_first_after_a_lost_connection(r: Rig) -> None:
    """The probed replica took the key. The first replica reports its session's end before the welcome comes."""
    before = r.serving
    for other in r.others:
        other.welcoming = False
    await first_unready_tick(r)
    while not any(other.hellos for other in r.others):  # noqa: ASYNC110  # virtual
        await asyncio.sleep(0.01)
    [probed] = [other for other in r.others if other.hellos]
    for other in r.others:
        other.welcoming = True
    before.down()
    assert await r.reconnected(2) is probed


@in_rig(rig, 3)
async def test_an_unanswered_probe_ends_once_the_first_replica_is_ready_again(
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
async def test_a_session_moves_again_if_its_new_replica_becomes_unready(r: Rig) -> None:
    before = r.serving
    await first_unready_tick(r)
    after = await r.reconnected(2)
    assert after is not before
    before.ready, before.refuse_hello = True, None
    unready(after)
    assert await r.reconnected(3) is before


@in_rig(rig, 2)
async def test_leaving_during_a_probe_ends_the_session(r: Rig) -> None:
    [other] = r.others
    other.welcoming = False
    await first_unready_tick(r)
    await asyncio.sleep(2.5)
    leaving = asyncio.create_task(r.session.leave())
    await asyncio.sleep(0.1)
    r.serving.links[-1].close()
    await leaving
    await r.running


@in_rig(rig, 2)
async def test_leaving_closes_the_stream_of_a_pending_probe(r: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    board, [other] = r.serving.board, r.others
    dial, opened = board.dial, list[MemoryLink]()

    @asynccontextmanager
    async def slow_to_close(caller: str, callee: str) -> AsyncIterator[MemoryLink]:
        async with dial(caller, callee) as link:
            opened.append(link)
            try:
                yield link
            finally:
                await asyncio.sleep(0.5)

    monkeypatch.setattr(board, "dial", slow_to_close)
    other.welcoming = False
    await first_unready_tick(r)
    await other.until(lambda: bool(other.hellos))
    leaving = asyncio.create_task(r.session.leave())
    await asyncio.sleep(0.1)
    r.serving.links[-1].close()
    await leaving
    await r.running
    assert [link.over for link in opened] == [True]


@in_rig(rig, 3)
async def test_a_probe_ends_with_the_connection_it_was_made_for(r: Rig) -> None:
    """t1: the probe sends a hello. t2: the link is lost. t3: another replica welcomes. t4: t1 is welcomed late."""
    for other in r.others:
        other.welcoming = False
    await first_unready_tick(r)
    while not any(other.hellos for other in r.others):  # noqa: ASYNC110  # virtual
        await asyncio.sleep(0.01)
    probed, third = sorted(r.others, key=lambda other: -len(other.hellos))
    third.welcoming = True
    probed.refuse_hello = errors.Unavailable("this replica is not ready")
    r.serving.down()
    assert await r.reconnected(2) is third
    probed.welcome(probed.links[0])
    await asyncio.sleep(1.0)
    probed.welcoming, probed.refuse_hello = True, None
    hellos = len(probed.hellos)
    third.down()
    assert await r.reconnected(3) is probed
    assert len(probed.hellos) == hellos + 1, "welcomed by a hello of now, not by the late welcome"
