"""Watches: every change, in order, in whole revisions, from any revision that is not compacted."""

from __future__ import annotations

import asyncio

import pytest

from strata.core.kv.store import Compacted
from strata.core.kv.txn import Delete, Put, Txn, delete_prefix
from tests.contract.conftest import Subject, soon


async def test_watch_events_carry_the_new_state(subject: Subject) -> None:
    first = await subject.put("a", value=b"1")
    second = await subject.put("a", value=b"2")
    await subject.store.execute(Txn(success=(Delete(key=subject.key("a")),)))
    async with subject.watching(first) as watcher:
        one, two, three = await watcher.events(3)
    assert (one.kv.value, one.kv.create_revision, one.kv.mod_revision, one.kv.version) == (
        b"1",
        first,
        first,
        1,
    )
    assert (two.kv.value, two.kv.create_revision, two.kv.mod_revision, two.kv.version) == (
        b"2",
        first,
        second,
        2,
    )
    assert (three.deleted, three.kv.key, three.kv.mod_revision) == (True, subject.key("a"), second + 1)
    assert not one.deleted
    assert not two.deleted


async def test_a_watch_starts_at_the_requested_revision_and_continues(subject: Subject) -> None:
    await subject.put("before")
    start = await subject.put("a")
    await subject.put("b")
    async with subject.watching(start) as watcher:
        assert await watcher.changes(2) == ["+a", "+b"]
        await subject.put("c")
        assert await watcher.changes(1) == ["+c"]
        await subject.other.execute(Txn(success=(delete_prefix(subject.prefix),)))
        assert await watcher.changes(4) == ["-a", "-b", "-before", "-c"]


async def test_a_watch_never_splits_a_revision(subject: Subject) -> None:
    start = await subject.head() + 1
    async with subject.watching(start) as watcher:
        for number in range(20):
            await subject.put(*(f"{number}/{part}" for part in range(100)))
        seen: list[str] = []
        while len(seen) < 2_000:
            batch = await watcher.batch()
            seen.extend(event.kv.key for event in batch.events)
            assert len(seen) % 100 == 0
    assert seen == [subject.key(f"{number}/{part}") for number in range(20) for part in range(100)]


async def test_large_revisions_arrive_whole(subject: Subject) -> None:
    start = await subject.head() + 1
    async with subject.watching(start) as watcher:
        for name in "abc":
            puts = tuple(Put(key=subject.key(f"{name}{part}"), value=b"x" * 11_000) for part in range(128))
            await subject.store.execute(Txn(success=puts))
        seen = 0
        while seen < 3 * 128:
            seen += len((await watcher.batch()).events)
            assert seen % 128 == 0


async def test_events_of_a_transaction_keep_the_order_of_its_operations(subject: Subject) -> None:
    before = await subject.put("x1", "x2")
    await subject.store.execute(
        Txn(
            success=(
                Put(key=subject.key("b"), value=b""),
                delete_prefix(subject.key("x")),
                Put(key=subject.key("a"), value=b""),
            )
        )
    )
    async with subject.watching(before + 1) as watcher:
        assert await watcher.changes(4) == ["+b", "-x1", "-x2", "+a"]


async def test_a_watch_receives_only_its_range(subject: Subject) -> None:
    start = await subject.head() + 1
    async with subject.watching(start, name="b") as one, subject.watching(start) as all_:
        await subject.put("a")
        await subject.put("b")
        await subject.put("bb")
        await subject.put("b")
        assert await one.changes(2) == ["+b", "+b"]
        assert await all_.changes(4) == ["+a", "+b", "+bb", "+b"]


async def test_a_watch_from_the_future_waits_for_it(subject: Subject) -> None:
    head = await subject.head()
    async with subject.watching(head + 3) as watcher:
        for name in ("one", "two", "three", "four"):
            await subject.put(name)
        assert await watcher.changes(2) == ["+three", "+four"]


async def test_progress_is_reported_while_the_watched_range_is_idle(subject: Subject) -> None:
    start = await subject.head() + 1
    async with subject.watching(start, name="quiet") as watcher:
        elsewhere = await subject.put("loud")
        batch = await watcher.batch()
        while batch.revision < elsewhere:
            batch = await watcher.batch()
        assert batch.events == ()
        own = await subject.put("quiet")
        batch = await watcher.batch()
        while not batch.events:
            batch = await watcher.batch()
        assert batch.revision == own


async def test_giving_up_a_wait_loses_nothing(subject: Subject) -> None:
    start = await subject.head() + 1
    seen: list[str] = []
    async with subject.watching(start) as watcher:
        for number in range(20):
            waiting = asyncio.ensure_future(watcher.batch())
            await subject.put(str(number))
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                seen += [event.kv.key for event in waiting.result().events]
        while len(seen) < 20:
            seen += [event.kv.key for event in (await watcher.batch()).events]
    assert seen == [subject.key(str(number)) for number in range(20)]


async def test_a_watch_from_a_compacted_revision_is_refused(subject: Subject) -> None:
    first = await subject.put("a")
    second = await subject.put("a")
    await subject.store.compact(second)
    async with subject.store.watch(subject.key("a"), None, start_revision=first) as batches:
        with pytest.raises(Compacted, match=f"{second} is the oldest left"):
            await soon(anext(batches))


async def test_a_watch_can_start_at_the_compacted_revision(subject: Subject) -> None:
    await subject.put("a", "b")
    deleted = (await subject.store.execute(Txn(success=(Delete(key=subject.key("a")),)))).revision
    await subject.put("b")
    await subject.store.compact(deleted)
    async with subject.watching(deleted) as watcher:
        assert await watcher.changes(2) == ["-a", "+b"]


async def test_a_compaction_takes_nothing_from_a_watch_that_keeps_up(subject: Subject) -> None:
    start = await subject.head() + 1
    async with subject.watching(start, name="quiet") as watcher:
        head = 0
        while head < start + 5:
            head = await subject.put("loud")
        await watcher.batch()  # by now the watcher has these revisions, or a progress notice before them
        await subject.store.compact(head)
        own = await subject.put("quiet")
        batch = await watcher.batch()
        while not batch.events:
            batch = await watcher.batch()
        assert batch.revision == own
