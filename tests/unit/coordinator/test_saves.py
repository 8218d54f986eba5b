"""Saves end with their generation, complete ones are committed by anybody, shards follow the world."""

from __future__ import annotations

import asyncio

import pytest

from strata.core.checkpoints import (
    AckRequest,
    Author,
    BeginRequest,
    SealRequest,
    decide_ack,
    decide_begin,
    decide_seal,
)
from strata.core.datasets import decide_register_dataset
from strata.core.ids import AttemptId, WorkerId
from strata.core.job import JobView
from strata.core.records import (
    Assignment,
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    DatasetSpec,
    Seal,
    encode,
)
from strata.core.txn import Put, Txn
from strata.core.view import View
from strata.testing.network import Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time
from tests.not_none import not_none
from tests.unit.coordinator.rig import in_rig, now
from tests.unit.coordinator.serving_rig import JOB, Cluster, Node, cluster, in_cluster

STEP = 20


def author(job: JobView, rank: int) -> Author:
    world = not_none(job.world())
    member = world.member_of(rank)
    return Author(
        worker=member.worker,
        incarnation=member.incarnation,
        generation=world.head.generation,
        rank=rank,
    )


def state(view: View, generation: int, step: int = STEP) -> CheckpointState | None:
    entry = JobView(view, JOB).checkpoint(step, generation)
    return entry.record.state if entry is not None else None


class Save:
    """One save of a world, asked for through any node."""

    def __init__(self, node: Node, step: int = STEP) -> None:
        self.step = step
        job = JobView(node.view, JOB)
        world = not_none(job.world())
        self.generation = world.head.generation
        self.authors = [author(job, rank) for rank in range(world.head.size)]
        self.attempt = AttemptId(f"attempt-{step}-{self.generation}")

    async def begin(self, node: Node) -> None:
        request = BeginRequest(
            author=self.authors[0],
            step=self.step,
            type=CheckpointType.FULL,
            root="file:///tmp",
            attempt=self.attempt,
        )
        await node.context.executor.settle(
            lambda view: decide_begin(JobView(view, JOB), request, now_unix_ms=1)
        )

    async def ack(self, node: Node, rank: int) -> None:
        request = AckRequest(
            author=self.authors[rank],
            step=self.step,
            attempt=self.attempt,
            digest=f"digest-{rank}",
            size_bytes=1,
        )
        await node.context.executor.settle(
            lambda view: decide_ack(JobView(view, JOB), request), coalesce=True
        )

    async def seal(self, node: Node) -> None:
        request = SealRequest(
            author=self.authors[0],
            step=self.step,
            attempt=self.attempt,
            digest="digest",
            size_bytes=2,
        )
        await node.context.executor.settle(lambda view: decide_seal(JobView(view, JOB), request))

    async def all(self, node: Node) -> None:
        await self.begin(node)
        for rank in range(len(self.authors)):
            await self.ack(node, rank)
        await self.seal(node)


async def world_of_two(f: Cluster, node: Node) -> None:
    for worker in "ab":
        await f.register(node, worker, min_workers=1, max_workers=2)
    for each in f.alive:
        await f.generation(each, 1)


async def committed(node: Node, generation: int, step: int = STEP) -> None:
    async with asyncio.timeout(5):
        await node.context.mirror.wait_until(
            lambda view: state(view, generation, step) is CheckpointState.COMMITTED
        )


@in_rig(cluster, idle=True)
async def test_a_save_whose_parts_came_through_all_replicas_is_committed(f: Cluster) -> None:
    a, b, c = f.all
    await world_of_two(f, a)
    save = Save(a)
    await save.begin(a)
    async with asyncio.TaskGroup() as tasks:  # the last two acks at once, by two replicas
        tasks.create_task(save.ack(b, 0))
        tasks.create_task(save.ack(c, 1))
    await a.context.mirror.fresh()
    await save.seal(a)
    await committed(a, 1)
    assert not_none(JobView(a.view, JOB).latest()).record.step == STEP


@in_rig(cluster, idle=True)
async def test_a_save_is_committed_without_any_leader(f: Cluster) -> None:
    leader, node = await f.leader(), await f.follower()
    await world_of_two(f, node)
    await leader.crash()
    await Save(node).all(node)
    await committed(node, 1)
    assert not any(n.leads for n in f.alive)


@in_rig(cluster, 1, idle=True)
async def test_a_save_that_was_complete_before_any_replica_ran_is_committed_at_the_start(f: Cluster) -> None:
    (node,) = f.all
    await f.leader()
    await world_of_two(f, node)
    save = Save(node)
    await save.begin(node)
    for rank in (0, 1):
        await save.ack(node, rank)
    client = node.client
    await node.crash()
    client.heal()
    # The seal arrives with nobody there to see it.
    assert JobView(node.view, JOB).checkpoint(STEP, 1) is not None
    seal = encode_seal(save)
    f.store.execute(Txn(success=(Put(key=JOB.seal(STEP, 1, save.attempt), value=seal),)))
    again = f.add("r2")
    await committed(again, 1)
    # its members belong to a replica that is gone; they come back here
    for worker in "ab":
        await f.register(again, worker)


def encode_seal(save: Save) -> bytes:
    return encode(
        Seal(digest="digest", size_bytes=2, worker=WorkerId("a"), incarnation=save.authors[0].incarnation)
    )


@in_cluster(Cluster.follower, idle=True)
async def test_an_open_save_is_given_up_before_the_next_world(f: Cluster, node: Node) -> None:
    await world_of_two(f, node)
    save = Save(node)
    await save.begin(node)
    await save.ack(node, 0)
    await f.leave(node, "b")
    job = await f.generation(node, 2)
    head, record = job.head(), job.checkpoint(STEP, 1)
    assert head is not None
    assert record is not None
    assert record.record.state is CheckpointState.ABORTED
    assert "b is gone" in record.record.reason
    assert record.mod_revision < head.mod_revision
    assert head.record.restore is None


@in_cluster(Cluster.follower, idle=True)
async def test_the_next_world_begins_from_what_was_committed(f: Cluster, node: Node) -> None:
    await world_of_two(f, node)
    await Save(node).all(node)
    await committed(node, 1)
    await f.leave(node, "b")
    job = await f.generation(node, 2)
    head, latest = job.head(), job.latest()
    assert head is not None
    assert head.record.restore is not None
    assert head.record.restore.step == STEP
    assert latest is not None
    assert (latest.record.generation, latest.record.record_generation) == (2, 1)


@in_virtual_time()
async def test_a_save_begun_just_before_the_head_is_given_up_after_it() -> None:
    """The leader's view does not show it when the head is written."""
    record = CheckpointRecord(
        attempt=AttemptId("late"),
        step=STEP,
        generation=1,
        type=CheckpointType.FULL,
        state=CheckpointState.OPEN,
        ranks=2,
        path="file:///tmp/late",
    )

    class BeginsLate(PromptNetwork):
        def fate(self, call: Call) -> Fate:
            txn = call.argument
            if isinstance(txn, Txn) and any(
                isinstance(op, Put) and op.key == JOB.head and b'"generation":2' in op.value
                for op in txn.success
            ):
                put = Put(key=JOB.checkpoint(STEP, 1), value=encode(record))
                f.store.execute(Txn(success=(put,)))
            return Fate()

    async with cluster(0, idle=True) as f:
        node = f.add("r1", network=BeginsLate())
        await f.leader()
        await world_of_two(f, node)
        await f.leave(node, "b")
        await f.generation(node, 2)
        async with asyncio.timeout(1):
            await node.context.mirror.wait_until(lambda view: state(view, 1) is CheckpointState.ABORTED)


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


# -- orphans: the clock of grace --------------------------------------------------------------


async def gone(node: Node, worker: str) -> float:
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
    assert await gone(stays, "w") - elected_at == pytest.approx(5, abs=0.2)


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
    assert await gone(leader, "w") - ready_at == pytest.approx(5, abs=0.2)
