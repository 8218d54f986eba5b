"""A list that is replaced, or goes, between two pages is begun again: pages of two of them are no list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from strata.core import records
from strata.core.chunks import chunks_of
from strata.core.ids import InstanceId, ReplicaId, WorkerId
from strata.core.records import encode
from strata.core.txn import Delete, Put, Txn
from strata.testing.virtual_time import in_virtual_time
from strata.v1 import datasets_pb2, recovery_pb2, worlds_pb2
from strata.wire.pages import whole_async
from tests.unit.coordinator.rig import in_rig
from tests.unit.coordinator.serving_rig import JOB, KEYS, Cluster

GENERATION = 7
SHARDS = 100_000
A, B = WorkerId("a"), WorkerId("b")
DATASETS = ("d0", "d1", "d2")


def assignment(*workers: WorkerId, epoch: int) -> bytes:
    return encode(
        records.Assignment(
            assign_epoch=epoch, epoch=5, generation=GENERATION - 1, shards=SHARDS, workers=workers
        )
    )


@asynccontextmanager
async def filled() -> AsyncIterator[Cluster]:
    """Have a replica that leads nothing, with a world of one member and its datasets as two members had them."""
    members = [records.Member(worker=A, incarnation=9, group_rank=n, slots=1, first_rank=n) for n in range(3)]
    chunks = chunks_of(members)
    found: dict[str, Any] = {
        KEYS.leader: records.Leader(instance=InstanceId("i-e"), replica=ReplicaId("e"), address="e:1"),
        JOB.spec: records.JobSpec(min_workers=1, max_workers=2),
        JOB.head: records.WorldHead(
            generation=GENERATION, epoch=5, members=3, size=3, reason="r", chunks=len(chunks)
        ),
    }
    puts = [Put(key=key, value=encode(record)) for key, record in found.items()]
    puts += [Put(key=JOB.members_chunk(GENERATION, 5, n), value=value) for n, value in enumerate(chunks)]
    for name in DATASETS:
        spec = records.DatasetSpec(shards=SHARDS, uri="u")
        puts.append(Put(key=JOB.dataset_spec(name), value=encode(spec)))
        puts.append(Put(key=JOB.assignment(name), value=assignment(A, B, epoch=3)))
    async with asyncio.TaskGroup() as tasks:
        cluster = Cluster(tasks, members=1, delay_s=0.0)
        cluster.store.execute(Txn(success=tuple(puts)))
        cluster.add("r1")
        await cluster.ready()
        yield cluster
        cluster.end()


async def asked(cluster: Cluster, name: str, request: Any, change: Callable[[], object]) -> tuple[Any, int]:
    """Return an answer with all of its pages, and how many these were; after the first one something changes."""
    pages = 0

    async def ask(message: Any) -> Any:
        nonlocal pages
        answer = await cluster["r1"].service.calls.answer(name, message, None)
        pages += 1
        if pages == 1:
            assert answer.next_page_token
            change()
            await cluster["r1"].context.mirror.fresh()
        return answer

    return await whole_async(ask, request), pages


@in_rig(filled)
async def test_a_recovery_has_the_shards_of_one_assignment_of_each_dataset(cluster: Any) -> None:
    """The leader writes the assignments after the world: both have the generation that the world has already."""

    def divide() -> None:
        puts = [Put(key=JOB.assignment(name), value=assignment(A, epoch=4)) for name in DATASETS]
        cluster.store.execute(Txn(success=tuple(puts)))

    request = recovery_pb2.RecoveryRequest(job="job", worker_id="a")
    answer, _pages = await asked(cluster, "get_recovery", request, divide)
    for name in DATASETS:
        mine = [shard for part in answer.shards if part.dataset == name for shard in part.shards]
        assert sorted(mine) == list(range(SHARDS)), name


@in_rig(filled)
async def test_an_assignment_that_goes_between_two_pages_is_not_half_of_one(cluster: Any) -> None:
    request = datasets_pb2.GetAssignmentRequest(job="job", dataset="d0")
    answer, _pages = await asked(
        cluster,
        "get_assignment",
        request,
        lambda: cluster.store.execute(Txn(success=(Delete(key=JOB.assignment("d0")),))),
    )
    assert (answer.assign_epoch, dict(answer.owners)) == (0, {})


@in_rig(filled)
async def test_a_dataset_that_is_registered_anew_has_another_list_with_the_same_epoch(cluster: Any) -> None:
    def replace() -> None:
        cluster.store.execute(Txn(success=(Delete(key=JOB.assignment("d0")),)))
        put = Put(key=JOB.assignment("d0"), value=assignment(A, epoch=3))
        cluster.store.execute(Txn(success=(put,)))

    request = datasets_pb2.GetAssignmentRequest(job="job", dataset="d0")
    answer, _pages = await asked(cluster, "get_assignment", request, replace)
    assert {name: len(owned.index) for name, owned in answer.owners.items()} == {"a": SHARDS}
    assert list(answer.workers) == ["a"]


@in_virtual_time()
async def test_a_world_and_a_recovery_that_go_between_two_pages_are_none() -> None:
    for name, request in (
        ("get_world", worlds_pb2.GetWorldRequest(job="job", page_size=1)),
        ("get_recovery", recovery_pb2.RecoveryRequest(job="job", worker_id="a", page_size=1)),
    ):
        async with filled() as cluster:

            def delete(cluster: Cluster = cluster) -> None:
                cluster.store.execute(Txn(success=(Delete(key=JOB.head),)))

            answer, _pages = await asked(cluster, name, request, delete)
            assert not answer.HasField("world"), name
