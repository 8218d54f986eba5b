"""Every unary answer has at most 256 KiB, however large the list is, and the pages add up to the whole list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from strata.coordinator.calls.pages import ANSWER_BYTES
from strata.core.access.authority import call_name
from strata.core.barriers.arrivals import MAX_PAYLOAD_BYTES, MAX_ROUND_BYTES
from strata.core.checkpoints.references import Keep, Reader, Retention, Tag
from strata.core.datasets.assignment import MAX_SHARDS
from strata.core.ids import AttemptId, BootId, InstanceId, ReplicaId, WorkerId
from strata.core.kv import records
from strata.core.kv.chunks import chunks_of
from strata.core.kv.records import CheckpointState, CheckpointType, encode
from strata.core.kv.txn import Put, Txn
from strata.errors import InvalidArgument, StaleGeneration, StrataError
from strata.testing.virtual_time import in_virtual_time
from strata.v1 import (
    barriers_pb2,
    checkpoints_pb2,
    datasets_pb2,
    members_pb2,
    recovery_pb2,
    worlds_pb2,
)
from strata.wire.pages import whole_async
from strata.wire.status import details
from tests.unit.coordinator.rig import in_rig
from tests.unit.coordinator.serving_rig import JOB, KEYS, Cluster

JOBS, CHECKPOINTS, MEMBERS, GENERATIONS, SLOTS, ROUNDS = 2_000, 5_000, 1_024, 200, 8, 20
DATASETS = 5
GENERATION = 7
FILES = (barriers_pb2, checkpoints_pb2, datasets_pb2, members_pb2, recovery_pb2, worlds_pb2)
UNARY = {
    call_name(each.name): GetMessageClass(each.input_type)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for each in service.methods
}
"""The request of every unary method but Admin.GetStatus, which reports on replicas and etcd only."""
PAGED = sorted(name for name, request in UNARY.items() if "page_token" in request.DESCRIPTOR.fields_by_name)
LONG = "x" * 100
CROWDED = 4_999


def worker(number: int) -> WorkerId:
    return WorkerId(f"worker-{number:04}-{LONG}")


def large() -> list[Put]:
    """Return the keys of 2,000 jobs, one with 1,024 members, 5,000 checkpoints and as much of everything else."""
    found: dict[str, Any] = {
        KEYS.leader: records.Leader(
            instance=InstanceId("i-elsewhere"), replica=ReplicaId("elsewhere"), address="e:1"
        )
    }
    for number in range(JOBS):
        job = KEYS.job(f"job-{number:04}-{LONG}")
        found[job.spec] = records.JobSpec()
        found[job.phase] = records.JobPhase(phase=records.Phase.RUNNING, reason="because " * 30)
    members = [
        records.Member(worker=worker(n), incarnation=9, group_rank=n, slots=SLOTS, first_rank=SLOTS * n)
        for n in range(MEMBERS)
    ]
    found[JOB.spec] = records.JobSpec(min_workers=1, max_workers=MEMBERS)
    chunks = chunks_of(members)
    puts = [
        Put(key=JOB.members_chunk(GENERATION, 5, index), value=value) for index, value in enumerate(chunks)
    ]
    restore = records.RestorePoint(step=CROWDED, attempt=AttemptId("a"), record_generation=GENERATION)
    found[JOB.head] = records.WorldHead(
        generation=GENERATION,
        epoch=5,
        members=MEMBERS,
        size=SLOTS * MEMBERS,
        reason="r" * 500,
        chunks=len(chunks),
        restore=restore,
    )
    for generation in range(1, GENERATIONS + 1):
        found[JOB.history_of(generation)] = records.GenerationRecord(
            epoch=5, members=1, size=1, reason="r" * 500, began_unix_ms=1, restore=restore
        )
    for n in range(MEMBERS):
        found[JOB.worker(worker(n))] = records.Worker(
            boot=BootId(f"boot-{n}"),
            served_by=InstanceId("i"),
            host=LONG,
            slots=SLOTS,
            devices=(LONG,) * SLOTS,
        )
    goes = records.Tier(path=f"file:///{LONG}", shared=True, state=records.TierState.DELETING)
    for step in range(CHECKPOINTS):
        found[JOB.checkpoint(step, GENERATION)] = records.CheckpointRecord(
            attempt=AttemptId("a"),
            step=step,
            generation=GENERATION,
            type=CheckpointType.FULL,
            state=CheckpointState.DELETING if step % 2 else CheckpointState.COMMITTED,
            ranks=SLOTS * MEMBERS,
            path=f"file:///{LONG}/step-{step}",
            tiers={"primary": goes} if step % 2 else {},
            metadata={"note": "n" * (60_000 if step >= CROWDED - 5 else 10)},
        )
    where = (CROWDED, GENERATION, "a")
    for number in range(300):
        found[JOB.tags_of(*where) + f"tag-{number}-{LONG}"] = Tag(
            step=CROWDED, generation=GENERATION, attempt=AttemptId("a")
        )
        found[JOB.readers(*where) + f"reader-{number}-{LONG}"] = Reader(who="ada")
        found[f"{JOB.refs(*where)}ref-{number}-{LONG}"] = Reader(who="ada")
    for rank in range(SLOTS * MEMBERS):
        found[JOB.ack(*where, rank)] = records.Ack(digest="d", size_bytes=1, worker=worker(0), incarnation=9)
    found[JOB.retention] = Retention(keep=Keep(latest=CHECKPOINTS))
    for number in range(DATASETS):
        found[JOB.dataset_spec(f"data-{number}")] = records.DatasetSpec(shards=MAX_SHARDS, uri="u" * 60_000)
        found[JOB.assignment(f"data-{number}")] = records.Assignment(
            assign_epoch=3,
            epoch=5,
            generation=GENERATION,
            shards=MAX_SHARDS,
            workers=(worker(0),) if number else tuple(worker(n) for n in range(300)),
        )
    payloads = {str(rank): records.b64(b"p" * MAX_PAYLOAD_BYTES) for rank in range(8)}
    for round_ in range(1, ROUNDS + 1):
        found[JOB.outcome("b", GENERATION, round_)] = records.BarrierOutcome(
            generation=GENERATION,
            round=round_,
            result=records.BarrierResult.RELEASED,
            digest="",
            reason="",
            payloads=payloads,
        )
    return puts + [Put(key=key, value=encode(record)) for key, record in found.items()]


@asynccontextmanager
async def filled() -> AsyncIterator[Cluster]:
    """Run one replica on all those keys. Another replica leads, so no controller changes them."""
    async with asyncio.TaskGroup() as tasks:
        c = Cluster(tasks, members=1, delay_s=0.0)
        puts = large()
        for start in range(0, len(puts), 16):
            c.store.execute(Txn(success=tuple(puts[start : start + 16])))
        await c.start("r1")
        stacks = [
            members_pb2.RankProgress(
                rank=rank, step=1, phase="p" * 64, stack="s" * 4096, trace_file="f" * 512
            )
            for rank in range(SLOTS * MEMBERS)
        ]
        c["r1"].service.board.note("job", GENERATION, stacks, own=True)
        yield c
        c.end()


def request(name: str) -> Any:
    """Return a request of this name about the largest object that it can name."""
    made: Any = UNARY[name]()
    about = {
        "job": "job",
        "step": CROWDED,
        "attempt": "a",
        "dataset": "data-0",
        "source_job": "job",
        "tag": "tag-1" if name in {"tag_checkpoint", "untag_checkpoint"} else "",
        "reader": "reader-1",
        "worker_id": worker(0) if name in {"get_recovery", "heartbeat", "leave", "report_rank_exit"} else "",
    }
    fields = made.DESCRIPTOR.fields_by_name
    for field, value in about.items():
        if field in fields and fields[field].message_type is None:
            setattr(made, field, value)
    if name == "wait_barrier":
        made.arrival.job, made.arrival.name, made.arrival.generation = "job", "large", GENERATION
        made.arrival.round, made.worker_id, made.incarnation = 1, worker(0), 9
        made.arrival.ranks.append(0)
    return made


def put_a_large_round(c: Cluster) -> int:
    """Record a round's outcome with the greatest allowed number of payloads; return that number."""
    count = MAX_ROUND_BYTES // MAX_PAYLOAD_BYTES
    payloads = {rank: records.b64(b"p" * MAX_PAYLOAD_BYTES) for rank in range(count)}
    key = (GENERATION, 1)
    for index in range(count // 8):
        part = {str(rank): payloads[rank] for rank in range(8 * index, 8 * index + 8)}
        c.put(JOB.payload_chunk("large", *key, index), encode(records.PayloadChunk(payloads=part)))
    outcome = records.BarrierOutcome(
        generation=GENERATION,
        round=1,
        result=records.BarrierResult.RELEASED,
        digest="",
        reason="all",
        payload_chunks=count // 8,
    )
    c.put(JOB.outcome("large", *key), encode(outcome))
    c.put(JOB.barrier_floor("large", GENERATION), encode(records.BarrierFloor(round=1)))
    return count


def counts(answer: Any) -> dict[str, int]:
    """Return the length of each list in an answer."""
    return {field.name: len(value) for field, value in answer.ListFields() if hasattr(value, "__len__")}


WHOLE: dict[str, dict[str, int]] = {
    "get_world": {"members": MEMBERS},
    "list_jobs": {"jobs": JOBS + 1},
    "list_members": {"members": MEMBERS},
    "list_generations": {"generations": GENERATIONS},
    "list_checkpoints": {"checkpoints": CHECKPOINTS},
    "list_datasets": {"datasets": DATASETS},
    "list_barriers": {"recent": ROUNDS + 1},
    "list_maintenance": {"tasks": CHECKPOINTS // 2},
    "get_retention": {"kept": CHECKPOINTS // 2},
    "get_assignment": {"workers": 300, "owners": 300},
    "get_recovery": {"rank_recoveries": SLOTS, "ranks": SLOTS},
    "wait_barrier": {},
}
FITS = {"get_world", "get_retention", "list_generations"}
"""Methods whose answer fits one page even at this size."""


@in_virtual_time()
async def test_every_unary_answer_is_bounded_and_its_pages_add_up_to_the_list() -> None:
    assert sorted(WHOLE) == PAGED, "a new list needs its line"
    async with filled() as c:
        payloads = put_a_large_round(c)
        await c["r1"].context.mirror.fresh()
        sizes: dict[str, list[int]] = {}
        refused: dict[str, StrataError] = {}

        async def ask(name: str, message: Any) -> Any:
            answer = await c["r1"].service.calls.answer(name, message, None)
            sizes.setdefault(name, []).append(answer.ByteSize())
            return answer

        # calls that end or remove an object come after the calls that read it
        last = ("close", "untag", "delete_ch", "leave", "delete_job")
        for name in sorted(UNARY, key=lambda each: (each.startswith(last), each)):
            try:
                if name not in PAGED:
                    await ask(name, request(name))
                    continue
                answer = await whole_async(partial(ask, name), request(name))
            except StrataError as error:
                refused[name] = error
                continue
            lengths = counts(answer)
            assert {each: lengths[each] for each in WHOLE[name]} == WHOLE[name], name
            if name == "wait_barrier":
                assert len(answer.outcome.payloads) == payloads
            if name == "get_assignment":
                owned = [shard for shards in answer.owners.values() for shard in shards.index]
                assert sorted(owned) == list(range(MAX_SHARDS))
            if name == "get_recovery":
                assert sum(len(shards.shards) for shards in answer.shards) >= (DATASETS - 1) * MAX_SHARDS
                assert answer.checkpoint.step == CROWDED
        assert not refused.keys() & set(PAGED), refused
        assert all(sum(len(value) for _key, value in details(error)) < 8192 for error in refused.values())
        too_large = {name: max(found) for name, found in sizes.items() if max(found) > ANSWER_BYTES}
        assert not too_large
        several = {name for name, found in sizes.items() if len(found) > 1}
        assert several >= set(PAGED) - FITS, "else it was no test"
        assert {"get_checkpoint", "get_job", "set_retention"} <= sizes.keys()


@in_rig(filled)
async def test_a_page_token_of_a_replaced_world_is_refused_as_stale(c: Any) -> None:
    calls = c["r1"].service.calls
    first = await calls.answer("get_world", worlds_pb2.GetWorldRequest(job="job", page_size=10), None)
    assert len(first.members) == 10
    assert first.world.generation == GENERATION
    rest = worlds_pb2.GetWorldRequest(job="job", page_token=first.next_page_token)
    second = await calls.answer("get_world", rest, None)
    assert second.members[0].group_rank == 10
    assert not second.HasField("world"), "what is no list comes once"
    rest.page_token = f"{1:020d}.1/{9:010d}"
    with pytest.raises(StaleGeneration, match="between two pages"):
        await calls.answer("get_world", rest, None)
    for name in sorted(FITS):
        small = request(name)
        small.page_size = 150 if name == "list_generations" else 900
        answer = await whole_async(partial(calls.answer, name, caller=None), small)
        assert {each: counts(answer)[each] for each in WHOLE[name]} == WHOLE[name]
    for wrong in ({"page_size": -1}, {"page_token": "x" * 600}):
        with pytest.raises(InvalidArgument):
            await calls.answer("list_jobs", worlds_pb2.ListJobsRequest(**wrong), None)


@in_rig(filled)
async def test_a_list_replaced_or_deleted_between_two_pages_is_read_from_its_start(c: Any) -> None:
    """A recovery lists the world and every assignment; the leader writes the assignments after the world."""
    calls, view = c["r1"].service.calls, c["r1"].view
    for name, key in (
        ("get_world", JOB.head),
        ("get_recovery", JOB.head),
        ("get_recovery", JOB.assignment("data-1")),
        ("get_assignment", JOB.assignment("data-0")),
    ):
        held = view.get(key).value
        for change in (partial(c.put, key, held), partial(c.delete, key)):
            first = request(name)
            first.page_size = 1
            rest = request(name)
            rest.page_token = (await calls.answer(name, first, None)).next_page_token
            assert rest.page_token
            change()
            await c["r1"].context.mirror.fresh()
            with pytest.raises(StaleGeneration, match="begin again"):
                await calls.answer(name, rest, None)
            await calls.answer(name, first, None)  # the list can be read from its start
        c.put(key, held)
        await c["r1"].context.mirror.fresh()
