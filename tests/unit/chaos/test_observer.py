"""The observer misses no event if connections are lost or it is killed; after a compaction it reports a gap."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from strata.core.kv.txn import Delete, Put, Txn
from strata.testing.memory_client import MemoryClient
from strata.testing.memory_store import MemoryStore
from strata.testing.virtual_time import in_virtual_time
from strata_chaos.history import History, HistoryWriter, Record
from strata_chaos.observer import Observer, Seen, seen_in

PREFIX = "/strata/v1/default/"


def put(store: MemoryStore, name: str, value: str = "{}") -> None:
    store.execute(Txn(success=(Put(key=PREFIX + name, value=value.encode()),)))


@contextlib.asynccontextmanager
async def observing(
    client: MemoryClient,
    path: Path,
    *,
    start_revision: int = 1,
    seen: Seen | None = None,
    listed_at: int = 0,
) -> AsyncIterator[Observer]:
    with HistoryWriter(path) as writer:
        clock = asyncio.get_running_loop().time
        observer = Observer(client, writer, prefix=PREFIX, seen=Seen() if seen is None else seen, clock=clock)
        stop = asyncio.Event()
        running = asyncio.create_task(observer.run(start_revision, stop, listed_at=listed_at))
        await asyncio.sleep(1)  # virtual time: until the observer has seen the existing keys
        yield observer
        stop.set()
        await running


def recorded(path: Path, op: str = "etcd.event") -> list[Record]:
    return [record for record in History(path) if record.op == op]


def revisions(path: Path) -> list[int]:
    return [record.result["revision"] for record in recorded(path)]


@in_virtual_time()
async def test_the_observer_records_all_events_and_each_keys_previous_revision(tmp_path: Path) -> None:
    path = tmp_path / "observer.jsonl"
    store = MemoryStore()
    put(store, "a", '{"n":1}')
    put(store, "a", '{"n":2}')
    async with observing(store.client(), path):
        store.execute(Txn(success=(Delete(key=f"{PREFIX}a"), Put(key=f"{PREFIX}b", value=b"{}"))))
        store.execute(Txn(success=(Put(key="/other/cluster", value=b"{}"),)))
    first, second, *both = [record.result for record in recorded(path)]
    assert first["prev"] is None
    assert second["prev"] == {"create_revision": first["revision"], "mod_revision": first["revision"]}
    assert second["create_revision"] == first["revision"]
    assert {(e["key"][-1], e["type"], e["value"]) for e in both} == {
        ("a", "delete", None),
        ("b", "put", "{}"),
    }
    assert len({e["revision"] for e in both}) == 1


@in_virtual_time()
async def test_a_lost_connection_causes_neither_a_gap_nor_a_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "observer.jsonl"
    store = MemoryStore()
    client = store.client()
    async with observing(client, path):
        for number in range(20):
            put(store, f"k{number}")
            if number % 5 == 2:
                client.break_watches()
        client.partition()
        for number in range(20, 30):
            put(store, f"k{number}")
        await asyncio.sleep(20)
        client.heal()
        await asyncio.sleep(20)
    assert revisions(path) == list(range(2, 32))


@in_virtual_time()
async def test_a_restarted_observer_resumes_even_in_the_middle_of_a_revision(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    store = MemoryStore()
    put(store, "a")
    store.execute(Txn(success=tuple(Put(key=f"{PREFIX}{name}", value=b"{}") for name in "bcd")))
    async with observing(store.client(), whole):
        pass
    lines = whole.read_text().splitlines(keepends=True)
    third = [index for index, line in enumerate(lines) if '"etcd.event"' in line][2]
    cut.write_text("".join(lines[: third + 1]))
    put(store, "e")
    async with observing(store.client(), cut, seen=seen_in(cut)):
        pass
    assert [record.result["key"][-1] for record in recorded(cut)] == list("abcde")


@in_virtual_time()
async def test_the_observer_lists_the_keys_of_a_snapshot_and_records_later_events(tmp_path: Path) -> None:
    path = tmp_path / "observer-2.jsonl"
    store = MemoryStore()
    put(store, "a", '{"n":1}')
    put(store, "b")
    put(store, "a", '{"n":2}')
    async with observing(store.client(), path, listed_at=3):
        put(store, "c")
    listed = [(r.result["key"][-1], r.result["value"]) for r in recorded(path, "etcd.listed")]
    assert listed == [("a", '{"n":1}'), ("b", "{}")]
    assert [r.args["why"] for r in recorded(path, "observer.listed")] == ["snapshot"]
    assert revisions(path) == [4, 5]


@in_virtual_time()
async def test_a_compaction_that_the_observer_missed_is_recorded_as_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "observer.jsonl"
    store = MemoryStore()
    client = store.client()
    async with observing(client, path):
        put(store, "a")
        await asyncio.sleep(1)
        client.partition()
        await asyncio.sleep(20)
        for _ in range(5):
            put(store, "b")
        store.compact(6)
        client.heal()
        await asyncio.sleep(20)
        put(store, "c")
    (gap,) = recorded(path, "observer.gap")
    assert gap.args["after"] == 2
    assert {record.result["key"][-1] for record in recorded(path, "etcd.listed")} == {"a", "b"}
    assert [record.result["key"][-1] for record in recorded(path)] == ["a", "c"]


@in_virtual_time()
async def test_the_observer_catches_up_at_its_end_and_records_it(tmp_path: Path) -> None:
    path = tmp_path / "observer.jsonl"
    store = MemoryStore()
    client = store.client()
    async with observing(client, path):
        client.break_watches()
        for number in range(20):
            put(store, f"k{number}")
    assert revisions(path) == list(range(2, 22))
    (ended,) = recorded(path, "observer.ended")
    assert (ended.args["complete"], ended.args["revision"]) == (True, 21)


@in_virtual_time()
async def test_the_observer_ends_without_etcd_and_records_itself_as_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "observer.jsonl"
    store = MemoryStore()
    client = store.client()
    async with observing(client, path):
        client.partition()
        put(store, "a")
    (ended,) = recorded(path, "observer.ended")
    assert ended.args["complete"] is False


@in_virtual_time()
async def test_samples_record_the_leader_epoch_and_the_revision(tmp_path: Path) -> None:
    path = tmp_path / "observer.jsonl"
    store = MemoryStore()
    async with observing(store.client(), path):
        put(store, "leader", '{"v":1}')
        await asyncio.sleep(2)
    samples = [record.result for record in recorded(path, "observer.sample")]
    assert samples[0]["epoch"] == 0
    assert (samples[-1]["epoch"], samples[-1]["revision"]) == (2, 2)
