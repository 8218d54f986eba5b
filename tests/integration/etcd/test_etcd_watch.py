"""Watches on real etcd: behaviour that only large, idle or compacted stores show."""

from __future__ import annotations

import asyncio

import pytest

from strata.core.kv.store import Compacted
from strata.core.kv.txn import Put, Range, Txn, WatchBatch, prefix_end
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.etcd import EtcdStore, Timing
from strata.etcd.watch import Watch
from strata.etcd.watch_stream import WatchStream
from strata.etcdapi import watch_pb2
from tests.etcd_fixtures import StartEtcd

LIMIT_S = 30.0


async def put(store: EtcdStore, *keys: str, value: bytes = b"") -> int:
    result = await store.execute(Txn(success=tuple(Put(key=key, value=value) for key in keys)))
    return result.revision


async def batch_with_events(watch: Watch) -> WatchBatch:
    async with asyncio.timeout(LIMIT_S):
        while not (batch := await anext(watch)).events:
            pass
        return batch


async def test_fragments_are_joined_to_whole_revisions(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragments: list[int] = []
    receive = WatchStream.receive

    async def spy(stream: WatchStream) -> watch_pb2.WatchResponse:
        answer = await receive(stream)
        if answer.fragment:
            fragments.append(len(answer.events))
        return answer

    monkeypatch.setattr(WatchStream, "receive", spy)
    prefix, keys, revisions = "/fragments/", 7, 30
    async with await EtcdStore.connect(etcd.endpoints) as store:
        first = 0
        for number in range(revisions):
            names = (f"{prefix}{number:02}/{part}" for part in range(keys))
            revision = await put(store, *names, value=b"x" * 25_000)
            first = first or revision
        # catching up on 5 MB, etcd puts several revisions in one response and splits responses anywhere
        seen: list[str] = []
        async with store.watch(prefix, prefix_end(prefix), start_revision=first) as watch:
            while len(seen) < keys * revisions:
                batch = await batch_with_events(watch)
                per_revision: dict[int, int] = {}
                for event in batch.events:
                    revision = event.kv.mod_revision
                    per_revision[revision] = per_revision.get(revision, 0) + 1
                assert set(per_revision.values()) == {keys}
                seen += [event.kv.key for event in batch.events]
    assert seen == [f"{prefix}{number:02}/{part}" for number in range(revisions) for part in range(keys)]
    assert any(count % keys for count in fragments), "etcd never cut a revision; the test shows nothing"


async def test_an_idle_watch_from_a_future_revision_receives_progress(start_etcd: StartEtcd) -> None:
    """etcd does not answer the progress request of a watch that starts after the newest revision."""
    cluster = start_etcd()
    timing = Timing(progress_s=0.05)
    async with await EtcdStore.connect(cluster.endpoints, timing=timing) as store:
        head = (await store.read(Range(key="k"))).revision
        async with store.watch("k", None, start_revision=head + 1) as watch, asyncio.timeout(LIMIT_S):
            for _ in range(3):
                assert await anext(watch) == WatchBatch(revision=head)
            assert watch.breaks == 0


async def test_compaction_while_the_watch_was_broken_is_reported(start_etcd: StartEtcd) -> None:
    cluster = start_etcd()
    async with (
        await EtcdStore.connect(cluster.endpoints) as store,
        store.watch("k", None, start_revision=1) as watch,
    ):
        first = await put(store, "k")
        assert (await batch_with_events(watch)).revision == first
        cluster.members[0].restart()
        await asyncio.to_thread(cluster.wait_healthy)
        async with await EtcdStore.connect(cluster.endpoints) as other:
            await put(other, "k")
            last = await put(other, "k")
            await other.compact(last)
        with pytest.raises(Compacted, match=f"{last} is the oldest left"):
            await batch_with_events(watch)


async def test_a_watch_survives_a_compaction_that_removes_no_event_it_still_needs(
    start_etcd: StartEtcd,
) -> None:
    cluster = start_etcd()
    async with (
        await EtcdStore.connect(cluster.endpoints) as store,
        store.watch("k", None, start_revision=1) as watch,
    ):
        first = await put(store, "k")
        assert (await batch_with_events(watch)).revision == first
        cluster.members[0].restart()
        await asyncio.to_thread(cluster.wait_healthy)
        async with await EtcdStore.connect(cluster.endpoints) as other:
            second = await put(other, "k")
            third = await put(other, "k")
            # compaction removes the revision at which the watch is, but no later revision
            await other.compact(second)
        revisions: list[int] = []
        while len(revisions) < 2:
            revisions += [event.kv.mod_revision for event in (await batch_with_events(watch)).events]
    assert revisions == [second, third]


async def test_a_slow_reader_loses_nothing(etcd: EtcdCluster) -> None:
    prefix, count = "/slow/", 400
    async with await EtcdStore.connect(etcd.endpoints) as store:
        first = await put(store, prefix + "0000")
        async with store.watch(prefix, prefix_end(prefix), start_revision=first) as watch:
            await batch_with_events(watch)
            # far more than the stream's window and etcd's buffer hold while the watch is not read
            for number in range(1, count):
                await put(store, f"{prefix}{number:04}", value=b"x" * 20_000)
            seen: list[str] = []
            while len(seen) < count - 1:
                seen += [event.kv.key for event in (await batch_with_events(watch)).events]
            assert watch.breaks == 0
    assert seen == [f"{prefix}{number:04}" for number in range(1, count)]
