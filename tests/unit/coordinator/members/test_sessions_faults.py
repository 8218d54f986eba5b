"""Members and their keys when writes are lost, views late, records corrupt, or replicas slow to stop."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial

import pytest

from strata.coordinator.members.failure_detector import FailureDetector
from strata.coordinator.members.unary import VirtualSession
from strata.core.ids import BootId, WorkerId
from strata.core.kv.codec import encode
from strata.core.kv.txn import Delete, Txn
from strata.errors import Refused, StaleGeneration, StrataError, Unavailable
from strata.testing.network import Fate
from strata.v1 import members_pb2, session_pb2
from tests.not_none import not_none
from tests.unit.coordinator.rig import Moment, Scripted, in_rig, now, slow_writes, writes
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, cluster, in_cluster, in_world

KEY = JOB.worker("w0")


@in_rig(cluster, 0, members=1)
async def test_a_registration_whose_answer_was_lost_leaves_no_key_behind(c: Cluster) -> None:
    written = Moment(lambda call: writes(call, KEY))
    node = await c.start("r9", network=written.network(partial(Cluster.cut_off, c, "r9")))
    member = c.member("w0")
    member.dial("r9")
    await written.came.wait()
    await member.over.wait()  # `Unavailable`, after the replica's own limit
    node.client.heal()
    await node.see(lambda view: view.get(KEY) is not None)
    await node.see(lambda view: view.get(KEY) is None)


def removals(network: Scripted) -> int:
    txns = [call.argument for call in network.calls if isinstance(call.argument, Txn)]
    return sum(Delete(key=KEY) in txn.success for txn in txns)


@in_rig(cluster, 0, members=1)
async def test_no_removal_is_sent_while_etcd_is_silent(c: Cluster) -> None:
    network = Scripted()
    await c.start("r1", network=network)
    member = await c.member("w0").connect("r1")
    c["r1"].client.partition()
    member.drop()
    await asyncio.sleep(30)
    assert not removals(network)
    c["r1"].client.heal()
    await c["r1"].see(lambda view: view.get(KEY) is None)
    assert removals(network) == 1


class BriefTransport:
    """A transport of a member that connects and disconnects again."""

    def __init__(self, member: Member) -> None:
        self.job = "job"
        self.worker = WorkerId(member.worker)
        self.boot = BootId(member.boot)
        self.incarnation = member.incarnation
        self.last_message_s = 0.0

    def quiet_s(self) -> float:
        return 0.0

    def dismiss(self, error: StrataError) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("back_s", [3.5, None], ids=["comes back", "is dead"])
@in_cluster(Cluster.joined, "w0", "r2", replicas=2, members=1)
async def test_a_member_handed_over_late_has_more_than_the_grace_to_reconnect(
    c: Cluster, member: Member, back_s: float | None
) -> None:
    """Another replica served the member until that moment, so none of the member's transports has failed."""
    before = not_none(c.worker("w0"))
    late = dataclasses.replace(before.record, served_by=c["r1"].context.instance)
    c.put(KEY, encode(late))
    await member.over.wait()
    assert isinstance(member.error, Unavailable)
    began_s = now()
    if back_s is not None:
        await asyncio.sleep(back_s)
        await member.connect("r2")
        assert member.incarnation == before.create_revision
        await asyncio.sleep(10)
        assert c.worker("w0") is not None
    else:
        await c["r1"].see(lambda view: view.get(KEY) is None)
        away_s = now() - began_s
        timing = c["r1"].context.timing
        assert away_s == pytest.approx(timing.detect_s - timing.reconnect_grace_s, abs=0.1)


@in_rig(cluster, 0, members=1)
async def test_each_connection_loss_restarts_the_grace(c: Cluster) -> None:
    network = Scripted()
    await c.start("r1", network=network)
    member = await c.member("w0").connect("r1")
    member.drop()
    await asyncio.sleep(0.9)
    # the removal is due in 0.1 s, but it needs a read of etcd first, which takes 0.6 s
    network.says = lambda call: Fate(delay_s=0.6 if call.kind == "read" else 0.0)
    await asyncio.sleep(0.2)
    failure_detector, back = c["r1"].service.failure_detector, BriefTransport(member)
    failure_detector.connected(back)
    failure_detector.disconnected(back)
    await asyncio.sleep(0.9)
    assert c.worker("w0") is not None, "it was lost 0.9 s ago, not 2"
    await c["r1"].see(lambda view: view.get(KEY) is None)


@in_cluster(Cluster.joined, "w0", "r1", replicas=1, members=1)
async def test_a_member_that_dies_during_a_second_session_has_exactly_the_grace(
    c: Cluster, member: Member
) -> None:
    failure_detector = c["r1"].service.failure_detector
    second = BriefTransport(member)
    second.incarnation = 0  # its registration is not complete
    failure_detector.connected(second)
    await asyncio.sleep(0.05)
    member.drop()
    failure_detector.disconnected(second, broke=False)
    died_s = now()
    await c["r1"].see(lambda view: view.get(KEY) is None)
    away_s = now() - died_s
    assert away_s == pytest.approx(c["r1"].context.timing.reconnect_grace_s, abs=0.1)


@in_cluster(Cluster.joined, "w0", "r1", replicas=1, members=1)
async def test_a_unary_member_is_removed_after_detect_s_plus_the_reconnect_grace(
    c: Cluster,
    member: Member,
) -> None:
    timing, failure_detector = c["r1"].context.timing, c["r1"].service.failure_detector
    unheard = VirtualSession("job", "w0", member.boot, failure_detector)
    failure_detector.connected(unheard)
    unheard.touch()  # as after a registration whose outcome was lost
    member.drop()
    began_s = now()
    await c["r1"].see(lambda view: view.get(KEY) is None)
    away_s = now() - began_s
    assert away_s == pytest.approx(timing.detect_s + timing.reconnect_grace_s, abs=0.1)


@pytest.mark.parametrize("replica", ["r1", "r2"])
@in_rig(cluster, 2, members=1)
async def test_a_successor_of_a_member_that_died_while_registering_is_admitted(
    c: Cluster, replica: str
) -> None:
    await c.start("r9", network=slow_writes(0.3))
    dead = c.member("w0")
    dead.dial("r9")
    await asyncio.sleep(0.1)
    dead.drop()
    await c["r1"].see(lambda view: view.get(KEY) is not None)
    began_s = now()
    newcomer = await c.member("w0", boot="another").connect(replica)
    assert newcomer.incarnation
    assert now() - began_s < c["r1"].context.timing.detect_s + 1


@in_rig(cluster, 1, members=1)
async def test_a_heartbeat_at_a_replica_that_is_behind_is_not_refused(c: Cluster) -> None:
    await c.start("r9", network=Scripted(watch_s=0.5))
    registration = members_pb2.Registration(job="job", worker_id="w0", boot="b", slots=1)
    answer = await c["r1"].service.calls.answer(
        "register", members_pb2.RegisterRequest(registration=registration), None
    )
    beat = members_pb2.HeartbeatRequest(job="job", worker_id="w0", boot="b", incarnation=answer.incarnation)
    await c["r9"].service.calls.answer("heartbeat", beat, None)
    entry = not_none(c.worker("w0"))
    assert entry.create_revision == answer.incarnation
    assert entry.record.served_by == c["r9"].context.instance


@in_rig(cluster, 1, members=2)
async def test_a_session_that_fails_during_its_welcome_leaves_no_member_key(c: Cluster) -> None:
    await c["r1"].context.mirror.fresh()
    c.put(JOB.head, b"written by hand")
    member = c.member("w0")
    member.dial("r1")
    await member.over.wait()
    assert isinstance(member.error, StrataError)
    await c["r1"].see(lambda view: view.get(KEY) is None)
    c.delete(JOB.head)
    await member.connect("r1")


@in_world("r1", "r2", "r3", delay_s=0.5)
async def test_a_replica_that_stops_slowly_declares_no_member_dead(c: Cluster, members: list[Member]) -> None:
    first = next(m for m in members if m.worker == "w0")
    c["r1"].replica.stop()
    await first.over.wait()
    await not_none(c["r1"].task)
    assert not_none(c.worker("w0")).create_revision == first.incarnation
    await first.connect("r2")


@in_world("r1", "r1", members=2)
async def test_an_arrival_of_a_removed_member_is_refused_as_stale_generation(
    c: Cluster, members: list[Member]
) -> None:
    leader = next(node for node in c.alive if node.context.election.epoch is not None)
    leader.process.freeze()
    member, other = members[0], next(node for node in c.alive if node is not leader)
    rank = (await member.world()).place.first_rank
    c.delete(JOB.worker(member.worker))
    await member.connect(other.name)
    member.arrive([rank])
    refused = await member.next("arrival_refused")
    leader.process.thaw()
    assert refused.error.code == StaleGeneration.code


@in_world("r1", "r1", members=2)
async def test_a_member_lost_while_the_failure_detector_stops_is_no_error(
    c: Cluster, members: list[Member]
) -> None:
    failure_detector = FailureDetector(c["r1"].context)  # a second one, to which no member is connected
    running = asyncio.create_task(failure_detector.run())
    await asyncio.sleep(0.5)  # its removals wait for the grace
    running.cancel()
    for _ in range(20):
        for member in members:
            failure_detector.look("job", member.worker)  # as the view would on a change
        await asyncio.sleep(0)
    await asyncio.wait([running])
    assert running.cancelled()


@in_rig(cluster, 2, members=2)
async def test_a_member_that_reconnects_only_to_leave_is_not_registered_again(c: Cluster) -> None:
    """The member's replica died before it answered the member's leave, which is recorded in etcd."""
    leaver, stayer = await c.world("r1", "r1")
    leaver.send(leave=session_pb2.Leave())
    await c["r2"].see(lambda view: view.get(JOB.worker(leaver.worker)) is None)

    again = members_pb2.Registration(
        job="job", worker_id=leaver.worker, boot=leaver.boot, slots=1, incarnation=leaver.incarnation
    )
    async with c.board.dial("client-again", "r2") as link:
        link.send(session_pb2.Up(hello=session_pb2.Hello(member=again, leaving=True)))
        with pytest.raises(Refused, match="has left"):
            await link.recv()
    await asyncio.sleep(2)
    assert c.worker(leaver.worker) is None
    assert not stayer.over.is_set()
