"""Several replicas: one leads, members become worlds, and the next leader continues."""

from __future__ import annotations

import asyncio

import pytest

from strata.core.housekeeping import KEPT_GENERATIONS
from strata.core.ids import InstanceId
from strata.core.job import JobView
from strata.core.kv.records import Replica, StopAction, decode, encode
from strata.core.kv.store import Compacted
from strata.core.kv.txn import Delete, Range, Txn
from strata.core.stop.last_step import BEGIN_BARRIER
from strata.core.stop.requests import LATE_S, LEAVE_EXPIRY_S, StopRequest, decide_stop
from strata.errors import ClusterReplaced, Conflict
from strata.testing.memory_store import MemoryStore
from strata.testing.virtual_time import in_virtual_time
from tests.not_none import not_none
from tests.unit.coordinator.rig import in_rig, now
from tests.unit.coordinator.serving_rig import JOB, KEYS, Cluster, Node, cluster, in_cluster
from tests.unit.core.rig import release


async def ready(nodes: list[Node]) -> None:
    while not all(n.replica.is_ready()[0] for n in nodes):  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0.01)


@in_rig(cluster, 1, idle=True)
async def test_a_world_waits_for_more_members_only_while_they_settle(f: Cluster) -> None:
    (node,) = f.all
    await f.leader()
    before = now()
    await f.register(node, "a", min_workers=1, max_workers=3, settle_s=2.0)
    await asyncio.sleep(1.5)
    await f.register(node, "b")
    job = await f.generation(node, 1)
    assert now() - before == pytest.approx(2.0, abs=0.1)
    assert len(not_none(job.world()).members) == 2


@in_rig(cluster, idle=True)
async def test_a_stopped_leader_resigns_so_that_its_successor_acts_at_once(f: Cluster) -> None:
    await ready(f.all)
    leader, node = await f.leader(), await f.follower()
    before = now()
    await leader.stop()
    await f.leader()
    assert now() - before < 0.1
    assert not_none(leader.idle).calls == ["start", "run", "stop"]
    await node.context.mirror.fresh()
    assert node.view.get(KEYS.replica(leader.name)) is None


@in_rig(cluster, 0, idle=True)
async def test_a_replica_stops_although_etcd_has_never_answered(f: Cluster) -> None:
    node = f.add("r1")
    node.client.partition()
    await asyncio.sleep(10)
    await node.stop()
    assert node.idle is None


@in_rig(cluster, 1, idle=True)
async def test_a_replica_stops_within_seven_seconds_while_etcd_is_unreachable(f: Cluster) -> None:
    (node,) = f.all
    await f.leader()
    node.client.partition()
    before = now()
    await node.stop()
    assert now() - before <= 7
    node.client.heal()


@in_rig(cluster, 1, idle=True)
async def test_readiness_follows_etcd(f: Cluster) -> None:
    (node,) = f.all
    await ready(f.all)
    await asyncio.sleep(30)
    assert node.replica.is_ready() == (True, "")
    node.client.partition()
    await asyncio.sleep(3)
    ok, reason = node.replica.is_ready()
    assert (ok, "etcd has not answered" in reason) == (False, True)
    node.client.heal()
    await ready(f.all)
    node.replica.stop()
    assert node.replica.is_ready() == (False, "it is stopping")


# -- registration -----------------------------------------------------------------------------


def registered(store: MemoryStore, name: str) -> Replica | None:
    kvs = store.read(Range(key=KEYS.replica(name))).kvs
    return decode(Replica, kvs[0].value) if kvs else None


@in_rig(cluster, 1, idle=True)
async def test_a_lost_registration_is_made_again(f: Cluster) -> None:
    (node,) = f.all
    await ready(f.all)
    f.delete(KEYS.replica("r1"))
    await asyncio.sleep(0.5)
    assert not_none(registered(f.store, "r1")).instance == node.context.instance
    node.client.partition()
    await asyncio.sleep(20)
    assert registered(f.store, "r1") is None, "its lease is over"
    node.client.heal()
    await ready(f.all)
    assert registered(f.store, "r1") is not None


@in_rig(cluster, 1, idle=True)
async def test_a_replica_restarted_at_its_address_takes_its_name_at_once(f: Cluster) -> None:
    await ready(f.all)
    await f.all[0].crash()
    began = now()
    again = f.add("r1")
    await ready([again])
    assert now() - began < 0.1
    assert not_none(registered(f.store, "r1")).instance == again.context.instance


@in_rig(cluster, 1, idle=True)
async def test_a_replica_restarted_at_another_address_waits_for_its_old_registration_to_expire(
    f: Cluster,
) -> None:
    await ready(f.all)
    await f.all[0].crash()
    again = Node(f, "r1", 2, address="elsewhere:50051")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(again.replica.run())
        await ready([again])
        again.replica.stop()
        await running


@in_rig(cluster, 0, idle=True)
async def test_a_replica_that_lost_its_name_does_not_take_it_back(f: Cluster) -> None:
    first = Node(f, "r1")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(outcome(first))
        await ready([first])
        twin = Replica(instance=InstanceId("twin"), address="r1:50051")
        f.put(KEYS.replica("r1"), encode(twin))
    assert isinstance(running.result(), Conflict)
    assert registered(f.store, "r1") == twin


@in_rig(cluster, 1, idle=True)
async def test_a_name_that_another_replica_holds_is_an_error(f: Cluster) -> None:
    await ready(f.all)
    twin = Node(f, "r1", 2, address="elsewhere:50051")
    with pytest.raises(Conflict, match="another replica named r1 runs at r1:50051"):
        await twin.replica.run()
    assert not_none(twin.idle).calls[-1] == "stop"
    assert f.all[0].replica.is_ready()[0]


# -- errors that end a replica, and errors that do not ----------------------------------------


@in_rig(cluster, 0, idle=True)
async def test_a_replaced_cluster_ends_the_replica_with_cluster_replaced(f: Cluster) -> None:
    node = Node(f, "r1")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(outcome(node))
        await node.context.mirror.started()
        f.delete(KEYS.uid)
    assert isinstance(running.result(), ClusterReplaced)
    assert not_none(node.idle).calls[-1] == "stop"


async def outcome(node: Node) -> BaseException | None:
    try:
        await node.replica.run()
    except Exception as error:  # noqa: BLE001  # handed to the test
        return error
    return None


@in_rig(cluster, idle=True)
async def test_invalid_records_depose_no_leader_and_stop_no_other_job(f: Cluster) -> None:
    await ready(f.all)
    leader = await f.leader()
    epoch = leader.context.election.epoch
    broken = KEYS.job("broken")
    for key in (broken.spec, broken.worker("w"), broken.head, broken.checkpoint(1, 1)):
        f.put(key, b"by hand")
    await f.register(leader, "a")
    await f.generation(leader, 1)
    await asyncio.sleep(60)
    assert leader.context.election.epoch == epoch
    assert all(n.replica.is_ready()[0] for n in f.all)
    f.store.execute(Txn(success=(Delete(key=broken.root, range_end=broken.root[:-1] + "0"),)))


@in_cluster(Cluster.leader, idle=True)
async def test_a_leader_key_written_by_hand_is_waited_out(f: Cluster, leader: Node) -> None:
    f.delete(KEYS.leader)
    f.put(KEYS.leader, b"by hand")
    await asyncio.sleep(10)
    assert not any(n.leads for n in f.all)
    assert not leader.leads
    f.delete(KEYS.leader)
    await f.leader()


# -- one leader an epoch, fenced --------------------------------------------------------------


# -- housekeeping, compaction -----------------------------------------------------------------


@in_cluster(Cluster.leader, idle=True)
async def test_the_world_keys_of_all_but_the_newest_generations_are_deleted(f: Cluster, node: Node) -> None:
    workers = [f"w{number}" for number in range(KEPT_GENERATIONS + 1)]
    for worker in workers:
        await f.register(
            node, worker, min_workers=1, max_workers=len(workers), max_no_progress_generations=100
        )
    job = await f.generation(node, 1)
    for generation in range(2, KEPT_GENERATIONS + 2):
        await f.leave(node, workers.pop())
        job = await f.generation(node, generation)
    await node.context.mirror.wait_until(lambda v: len(v.names(JOB.worlds)) == KEPT_GENERATIONS)
    assert [int(name) for name in job.view.names(JOB.worlds)] == list(range(2, KEPT_GENERATIONS + 2))


@in_cluster(Cluster.leader, idle=True)
async def test_etcd_history_older_than_five_minutes_is_compacted(f: Cluster, node: Node) -> None:
    await f.register(node, "a")
    old = f.store.state.head
    await asyncio.sleep(200)
    f.store.read(Range(key=KEYS.root, range_end=KEYS.root[:-1] + "0", revision=old))
    await f.register(node, "b")
    await asyncio.sleep(320)
    with pytest.raises(Compacted):
        f.store.read(Range(key=KEYS.root, range_end=KEYS.root[:-1] + "0", revision=old))
    await asyncio.sleep(600)


@pytest.mark.parametrize("seed", range(20))
def test_leaders_that_come_and_go_leave_one_world(seed: int) -> None:
    @in_virtual_time(seed=seed)
    async def scenario() -> None:
        async with cluster(idle=True) as f:
            node = await f.leader()
            for worker in "abcd":
                await f.register(node, worker, min_workers=1, max_workers=4, max_no_progress_generations=9)
            for round_, worker in enumerate("abc"):
                leader, survivor = await f.leader(), await f.follower()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(leader.crash())
                    tasks.create_task(f.leave(survivor, worker))
                for moves in "abcd"[round_ + 1 :]:
                    await f.register(survivor, moves)
                f.add(f"s{round_}")
            node = await f.leader()
            await asyncio.sleep(10)
            assert [m.worker for m in not_none(JobView(node.view, JOB).world()).members] == ["d"]

    scenario()


# -- the leader's timer for notices: if ranks ignore a notice, the leader (also a new one) acts a while after its grace

GRACE_S = 5.0


async def preempted(replicas: Cluster, node: Node) -> float:
    """Let two members train and get a notice, which they ignore; return the time of the notice."""
    for worker in ("w0", "w1"):
        await replicas.register(node, worker, min_workers=2, max_workers=2)
    await replicas.generation(node, 1)
    replicas.store.execute(release(JOB, BEGIN_BARRIER))
    request = StopRequest(action=StopAction.PREEMPT, grace_ms=int(1000 * GRACE_S))
    await node.context.executor.settle(lambda view: decide_stop(JobView(view, JOB), request))
    return now()


@in_cluster(Cluster.follower, idle=True)
async def test_a_preemption_ends_stuck_ranks_and_members_that_stay_train_again(
    replicas: Cluster,
    node: Node,
) -> None:
    clock = asyncio.get_running_loop().time
    notice_at = await preempted(replicas, node)
    forming = await replicas.generation(node, 2)
    assert GRACE_S + LATE_S - 0.1 <= clock() - notice_at <= GRACE_S + LATE_S + 1
    head = not_none(forming.head())
    assert head.record.forming
    assert len(head.record.leave_requests) == 1
    again = (await replicas.generation(node, 3)).head()
    assert GRACE_S + LEAVE_EXPIRY_S - 0.1 <= clock() - notice_at <= GRACE_S + LEAVE_EXPIRY_S + 1
    assert again is not None
    assert (again.record.members, again.record.leave_requests) == (2, ())


@in_cluster(Cluster.follower, idle=True)
async def test_a_new_leader_restarts_the_grace_period_of_a_notice(replicas: Cluster, node: Node) -> None:
    clock = asyncio.get_running_loop().time
    notice_at = await preempted(replicas, node)
    await asyncio.sleep(20)
    leader = await replicas.leader()
    await leader.stop()
    successor = await replicas.leader()
    assert successor is not leader
    await replicas.generation(node, 2)
    assert GRACE_S + LATE_S + 19 <= clock() - notice_at <= GRACE_S + LATE_S + 30
