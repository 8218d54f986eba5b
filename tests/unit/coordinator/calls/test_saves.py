"""Open saves end with their generation, any replica commits a complete save, and shards follow the world."""

from __future__ import annotations

import asyncio

import pytest

from strata.core.datasets.assignment import decide_register_dataset
from strata.core.ids import AttemptId
from strata.core.job import JobView
from strata.core.kv.records import (
    Assignment,
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    DatasetSpec,
    JobSpec,
    encode,
)
from strata.core.kv.txn import Put, Txn
from strata.core.kv.view import View
from strata.testing.network import Call, Fate
from tests.not_none import not_none
from tests.unit.coordinator.rig import Scripted, in_rig, now
from tests.unit.coordinator.serving_rig import JOB, Cluster, Node, cluster, in_cluster

STEP = 20


def state(view: View, generation: int, step: int = STEP) -> CheckpointState | None:
    entry = JobView(view, JOB).checkpoint(step, generation)
    return entry.record.state if entry is not None else None


async def world_of_two(f: Cluster, node: Node) -> None:
    for worker in "ab":
        await f.register(node, worker, min_workers=1, max_workers=2)
    for each in f.alive:
        await f.generation(each, 1)


def open_save() -> Put:
    record = CheckpointRecord(
        attempt=AttemptId("late"),
        step=STEP,
        generation=1,
        type=CheckpointType.FULL,
        state=CheckpointState.OPEN,
        ranks=2,
        path="file:///tmp/late",
    )
    return Put(key=JOB.checkpoint(STEP, 1), value=encode(record))


@in_cluster(Cluster.follower, idle=True)
async def test_an_open_save_is_given_up_before_the_next_world(f: Cluster, node: Node) -> None:
    await world_of_two(f, node)
    f.store.execute(Txn(success=(open_save(),)))
    await f.leave(node, "b")
    job = await f.generation(node, 2)
    head, given_up = not_none(job.head()), not_none(job.checkpoint(STEP, 1))
    assert given_up.record.state is CheckpointState.ABORTED
    assert "b is gone" in given_up.record.reason
    assert given_up.mod_revision < head.mod_revision
    assert head.record.restore is None


def is_second_head(call: Call) -> bool:
    txn = call.argument
    return isinstance(txn, Txn) and any(
        isinstance(op, Put) and op.key == JOB.head and b'"generation":2' in op.value for op in txn.success
    )


@in_rig(cluster, 0, idle=True)
async def test_a_save_begun_just_before_a_new_head_is_aborted(f: Cluster) -> None:
    """The leader's view does not have the save yet when it writes the head."""

    def begins_late(call: Call) -> Fate:
        if is_second_head(call):
            f.store.execute(Txn(success=(open_save(),)))
        return Fate()

    node = f.add("r1", network=Scripted(begins_late))
    await f.leader()
    await world_of_two(f, node)
    await f.leave(node, "b")
    await f.generation(node, 2)
    async with asyncio.timeout(1):
        await node.context.mirror.wait_until(lambda view: state(view, 1) is CheckpointState.ABORTED)


@in_rig(cluster, 0, idle=True)
async def test_a_head_planned_on_an_older_spec_is_discarded_and_planned_again(f: Cluster) -> None:
    larger = encode(JobSpec(min_workers=1, max_workers=9))

    def scales(call: Call) -> Fate:
        if is_second_head(call) and not_none(node.view.get(JOB.spec)).value != larger:
            f.put(JOB.spec, larger)
        return Fate()

    node = f.add("r1", network=Scripted(scales))
    await f.leader()
    await world_of_two(f, node)
    await f.leave(node, "b")
    job = await f.generation(node, 2)
    assert not_none(job.view.get(JOB.spec)).mod_revision < not_none(job.head()).mod_revision


# -- datasets ---------------------------------------------------------------------------------


def owners(view: View) -> tuple[str, ...] | None:
    record = view.record(JOB.assignment("digits"), Assignment)
    return record.workers if record is not None else None


@in_cluster(Cluster.follower, idle=True)
async def test_shards_follow_the_members_of_the_world(f: Cluster, node: Node) -> None:
    await world_of_two(f, node)
    await node.context.executor.settle(
        lambda view: decide_register_dataset(JobView(view, JOB), "digits", DatasetSpec(shards=100))
    )
    await node.context.mirror.wait_until(lambda view: owners(view) == ("a", "b"))
    await f.leave(node, "b")
    await node.context.mirror.wait_until(lambda view: owners(view) == ("a",))


# -- orphans: the leader's count of their grace -----------------------------------------------


async def wait_exit(node: Node, worker: str) -> float:
    await node.context.mirror.wait_until(lambda view: view.get(JOB.worker(worker)) is None)
    return now()


@in_rig(cluster, idle=True)
async def test_a_new_leader_gives_members_their_whole_grace_again(f: Cluster) -> None:
    await asyncio.sleep(10)
    leader = await f.leader()
    dies, stays = [n for n in f.all if n is not leader]
    await f.register(dies, "w")
    await f.generation(stays, 1)
    await dies.crash()
    await stays.context.mirror.wait_until(
        lambda view: view.get(stays.context.keys.replica(dies.name)) is None
    )
    await asyncio.sleep(4)
    await leader.stop()
    await f.leader()
    elected_at = now()
    assert await wait_exit(stays, "w") - elected_at == pytest.approx(5, abs=0.2)


@in_rig(cluster, 2, idle=True)
async def test_a_replica_that_becomes_ready_gives_members_time_to_come_to_it(f: Cluster) -> None:
    await asyncio.sleep(10)
    leader, dies = await f.leader(), await f.follower()
    await f.register(dies, "w")
    await f.generation(leader, 1)
    await dies.crash()
    await leader.context.mirror.wait_until(
        lambda view: view.get(leader.context.keys.replica(dies.name)) is None
    )
    await asyncio.sleep(4)
    f.add("r3")
    ready_at = now()
    assert await wait_exit(leader, "w") - ready_at == pytest.approx(5, abs=0.2)
