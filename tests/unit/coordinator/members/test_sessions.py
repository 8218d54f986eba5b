"""Members come, move, die and are replaced. Replicas and etcd fail, and no member may be removed because of that."""

from __future__ import annotations

import asyncio

import pytest

from strata.core.kv.txn import Delete, Txn
from strata.errors import ClusterReplaced, Conflict, StaleIncarnation, Unavailable
from strata.testing.network import Call, Fate, PromptNetwork
from strata.v1 import session_pb2, worlds_pb2
from strata.v1.session_pb2 import Leave
from strata.wire.errors import unpack
from tests.not_none import not_none
from tests.unit.coordinator.rig import in_rig, now
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, cluster, in_cluster, in_world

GRACE_S = 1.0
DETECT_S = 5.0


async def wait_exit(c: Cluster, member: Member) -> float:
    """Return the time at which the key of this member's incarnation is deleted."""
    incarnation = member.incarnation

    def missing(_view: object) -> bool:
        entry = c.worker(member.worker)
        return entry is None or entry.create_revision != incarnation

    await c.alive[0].see(missing)
    return now()


async def refused(member: Member, replica: str, **registration: object) -> Exception | None:
    member.dial(replica, **registration)
    await member.over.wait()
    return member.error


# -- opening ----------------------------------------------------------------------------------------


@in_cluster(Cluster.joined, "w0", "r1", members=2)
async def test_a_member_receives_its_welcome_and_its_world(c: Cluster, first: Member) -> None:
    assert first.all("world") == [], "there is none yet"
    second = await c.member("w1", slots=2).connect("r2")
    update = await first.world()
    assert (update.world.size, update.world.members) == (3, 2)
    assert (update.phase, update.token.uid) == (worlds_pb2.JOB_PHASE_RUNNING, "uid-1")
    places = [(await m.world()).place for m in (first, second)]
    assert sorted((p.worker_id, p.slots) for p in places) == [("w0", 1), ("w1", 2)]
    welcome = (await first.next("welcome")).SerializeToString()
    assert b"instance-r1" in welcome


@in_cluster(Cluster.joined, "w0", "r1", members=1)
async def test_a_standby_receives_the_world_without_a_place(c: Cluster, member: Member) -> None:
    await member.world()
    standby = await c.member("w1").connect("r2")
    update = await standby.world()
    assert not update.HasField("place")
    standby.arrive([0])
    assert (await standby.next("arrival_refused")).error.code == "REFUSED"


@in_rig(cluster, 1)
async def test_hellos_of_a_rank_and_of_another_clusters_client_are_refused(c: Cluster) -> None:
    async with c.board.dial("me", "r1") as link:
        link.send(session_pb2.Up(hello=session_pb2.Hello(rank=session_pb2.RankHello(rank=1))))
        with pytest.raises(Exception, match="its agent"):
            await link.recv()
    async with c.board.dial("me", "r1") as link:
        hello = session_pb2.Hello()
        hello.token.uid, hello.token.revision = "another", 1
        hello.member.job = "job"
        link.send(session_pb2.Up(hello=hello))
        with pytest.raises(ClusterReplaced):
            await link.recv()


@in_cluster(Cluster.joined, "w0", "r1")
async def test_ticks_list_the_ready_replicas(c: Cluster, member: Member) -> None:
    tick = await member.next("tick", after=1)
    assert tick.ready
    assert sorted(tick.ready_addresses) == ["r2", "r3"]
    await c["r2"].crash()
    await member.until(lambda: [list(t.ready_addresses) for t in member.all("tick")][-1] == ["r3"])


# -- moving -----------------------------------------------------------------------------------------


@in_cluster(Cluster.joined, "w0", "r1", members=1)
async def test_a_hand_over_keeps_the_incarnation_and_ends_the_old_session(c: Cluster, member: Member) -> None:
    await member.world()
    old = c.member("w0")
    old.incarnation = member.incarnation
    await old.connect("r2")  # the same boot, while the first stream is still open
    await member.over.wait()
    assert isinstance(member.error, Unavailable)
    assert old.incarnation == member.incarnation
    entry = not_none(c.worker("w0"))
    assert entry.record.served_by == "instance-r2-2"
    await asyncio.sleep(30)
    assert not old.over.is_set()
    assert c.worker("w0") == entry, "the loss of the old stream killed nobody"


@in_cluster(Cluster.joined, "w0", "r1", members=1)
async def test_a_newer_session_of_the_same_boot_at_the_same_replica_replaces_the_older(
    c: Cluster, member: Member
) -> None:
    again = await c.member("w0").connect("r1")
    await member.over.wait()
    await asyncio.sleep(10)
    assert not again.over.is_set()
    assert again.incarnation == member.incarnation


@in_cluster(Cluster.joined, "w0", "r1", members=1)
async def test_a_reconnect_within_the_grace_keeps_everything(c: Cluster, member: Member) -> None:
    for replica in ("r1", "r2", "r2", "r3"):
        member.drop()
        await asyncio.sleep(0.9 * GRACE_S)
        before = member.incarnation
        await member.connect(replica)
        assert member.incarnation == before
    assert (await member.world()).world.generation == 1


# -- dying ------------------------------------------------------------------------------------------


@in_world("r1", "r2", members=2)
async def test_a_broken_stream_is_a_death_after_the_grace(c: Cluster, members: list[Member]) -> None:
    broke = now()
    members[1].drop()
    died = await wait_exit(c, members[1])
    assert GRACE_S <= died - broke < GRACE_S + 0.2


@in_cluster(Cluster.joined, "w0", "r1", members=1)
async def test_a_leave_is_on_record_when_the_stream_ends(c: Cluster, member: Member) -> None:
    member.send(leave=Leave(reason="done"))
    await member.over.wait()
    assert member.error is None
    assert c.worker("w0") is None


@in_cluster(Cluster.joined, "w0", "r1", replicas=1, members=2)
async def test_an_etcd_outage_removes_no_member_but_a_lost_one_is_removed_later(
    c: Cluster, back: Member
) -> None:
    dead = await c.member("w1").connect("r1")
    c["r1"].client.partition()
    back.drop()
    dead.drop()
    await asyncio.sleep(15)
    back.dial("r1")
    await asyncio.sleep(3)
    assert back.over.is_set(), "nothing can be settled here: it may be welcome elsewhere"
    c["r1"].client.heal()
    back.dial("r1")
    await back.next("welcome")
    await wait_exit(c, dead)
    await asyncio.sleep(20)
    assert not_none(c.worker("w0")).create_revision == back.incarnation
    assert not back.over.is_set()


class LateRemoval(PromptNetwork):
    """Lose the answer of the first removal; the removal takes effect only much later."""

    def __init__(self) -> None:
        self.late = False

    def fate(self, call: Call) -> Fate:
        txn = call.argument
        if isinstance(txn, Txn) and not self.late and txn.success == (Delete(key=JOB.worker("w0")),):
            self.late = True
            return Fate(delay_s=3.0)
        return Fate()


@in_rig(cluster, 0, members=1)
async def test_a_removal_under_way_does_not_reach_a_member_that_is_back(c: Cluster) -> None:
    network = LateRemoval()
    await c.start("r1", network=network)
    member = await c.member("w0").connect("r1")
    member.drop()
    while not network.late:  # noqa: ASYNC110  # the time is virtual
        await asyncio.sleep(0.01)
    before = member.incarnation
    await member.connect("r1")
    await asyncio.sleep(20)
    assert member.incarnation == not_none(c.worker("w0")).create_revision == before
    assert not member.over.is_set()


@in_world("r1", "r2", "r3")
async def test_a_member_that_dies_with_its_replica_is_found(c: Cluster, members: list[Member]) -> None:
    died = now()
    members[2].drop()
    c["r3"].kill()
    assert await wait_exit(c, members[2]) - died < 13


# -- names ------------------------------------------------------------------------------------------


@in_cluster(Cluster.joined, "w0", "r1", members=1)
async def test_a_newcomer_under_a_live_name_is_held_and_then_refused(c: Cluster, member: Member) -> None:
    for replica in ("r1", "r2"):
        began = now()
        other = c.member("w0", boot="another")
        assert isinstance(await refused(other, replica), Conflict)
        assert DETECT_S <= now() - began < DETECT_S + 0.5
    assert not member.over.is_set()


@pytest.mark.parametrize("replica", ["r1", "r2"])
@in_cluster(Cluster.joined, "w0", "r1", members=1)
async def test_a_newcomer_takes_the_place_of_a_member_whose_transport_fails(
    c: Cluster, member: Member, replica: str
) -> None:
    await member.world()
    newcomer = c.member("w0", boot="another")
    newcomer.dial(replica)
    await asyncio.sleep(2)
    assert newcomer.all("welcome") == []
    broke = now()
    member.drop()
    await newcomer.next("welcome")
    assert newcomer.incarnation > member.incarnation
    # the replica that served the old session detects its loss immediately, other replicas only after the grace
    assert now() - broke < (0.2 if replica == "r1" else GRACE_S + 0.2)
    back = c.member("w0")
    back.incarnation = member.incarnation
    assert isinstance(await refused(back, "r3", incarnation=member.incarnation), StaleIncarnation)
    assert not newcomer.over.is_set()


@in_cluster(Cluster.joined, "w0", "r3", members=1)
async def test_a_newcomer_is_held_until_the_orphan_of_a_dead_replica_is_removed(
    c: Cluster, member: Member
) -> None:
    member.drop()
    c["r3"].kill()
    newcomer = c.member("w0", boot="another")
    await newcomer.connect("r1")
    assert newcomer.incarnation > member.incarnation


@in_cluster(Cluster.joined, "w0", "r1", members=1)
async def test_a_session_whose_registration_was_taken_reports_it_to_its_user(
    c: Cluster, member: Member
) -> None:
    c.delete(JOB.worker("w0"))  # for example, the leader took it for an orphan
    await member.over.wait()
    assert isinstance(member.error, Unavailable)
    await member.connect("r1")
    assert c.worker("w0") is not None
    value = not_none(c["r1"].view.get(JOB.worker("w0")))
    c.put(JOB.worker("w0"), value.value.replace(b"boot-w0", b"somebody"))
    await member.over.wait()
    ended = member.all("ended")
    assert isinstance(unpack(ended[0].error), StaleIncarnation)


# -- the end --------------------------------------------------------------------------------------
