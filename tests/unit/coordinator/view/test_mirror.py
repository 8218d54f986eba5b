"""The view follows the store: through partitions, compaction, lost events and replaced clusters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from strata.coordinator.view.mirror import ASK_S, Mirror
from strata.core.invariants import check
from strata.core.kv.records import ClusterUid, encode
from strata.core.kv.txn import Delete, Event, Put, Range, Txn, WatchBatch
from strata.core.kv.view import View
from strata.core.restore.records import Backup
from strata.errors import ClusterReplaced, Unavailable
from strata.testing import virtual_time
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Call, Fate
from strata.testing.virtual_time import in_virtual_time
from tests.unit.coordinator.rig import KEYS, Forgetful, Rig, Scripted, in_rig, now, put, rig


def same(view: View, store: MemoryStore) -> bool:
    """Tell whether the view equals the store below the root."""
    listed = store.read(Range(key=KEYS.root, range_end=KEYS.root[:-1] + "0"))
    return {kv.key: kv for kv in listed.kvs} == {kv.key: kv for kv in view.walk(KEYS.root)}


@in_rig(rig)
async def test_events_that_are_not_newer_are_dropped(r: Rig) -> None:
    """A resumed watch overlaps the previous watch; a key must not return to an older value."""
    await r.mirror.at_least(r.put("a", b"old"))
    old = r.mirror.view.get(KEYS.root + "a")
    revision = r.put("a", b"new")
    await r.mirror.at_least(revision)
    new = r.mirror.view.get(KEYS.root + "a")
    assert old is not None
    assert new is not None
    received: list[WatchBatch] = []
    r.mirror.subscribe(received.append)
    newer = replace(new, key=KEYS.root + "b", mod_revision=revision + 1)

    async def batches() -> AsyncIterator[WatchBatch]:
        yield WatchBatch(revision=revision, events=(Event(kv=new),))
        yield WatchBatch(revision=revision + 1, events=(Event(kv=old), Event(kv=newer)))
        await asyncio.Event().wait()

    @asynccontextmanager
    async def overlapping(*_: object, **_options: object) -> AsyncIterator[AsyncIterator[WatchBatch]]:
        yield batches()

    r.client.watch = overlapping  # type: ignore[method-assign,assignment]  # resumed too early
    r.client.break_watches()
    await r.mirror.wait_until(lambda view: view.revision > revision)
    assert r.get("a") == b"new"
    assert [(b.revision, len(b.events)) for b in received] == [(revision + 1, 1)]


@in_rig(rig)
async def test_a_backup_record_is_in_the_view_and_violates_no_invariant(r: Rig) -> None:
    backup = Backup(revision=1, unix_ms=2, where="file:///backups", size_bytes=3)
    for record in (encode(backup), b"somebody wrote this by hand"):
        await r.mirror.at_least(put(r.store, KEYS.backup, record))
        held = r.mirror.view.get(KEYS.backup)
        assert held is not None
        assert held.value == record
    assert await r.mirror.audit() == 0
    assert check(r.mirror.view, KEYS) == []


@in_virtual_time()
async def test_the_uid_is_created_once(store: MemoryStore) -> None:
    async with rig(store) as first, rig(store, name="r2") as second:
        assert first.mirror.uid == second.mirror.uid == "uid-1"
        uid = store.read(Range(key=KEYS.uid)).kvs[0]
        assert uid.version == 1


@in_rig(rig)
async def test_subscribers_receive_every_batch_in_order_after_the_view(r: Rig) -> None:
    received: list[tuple[int, int]] = []

    def hear(batch: WatchBatch) -> None:
        received.append((batch.revision, r.mirror.view.revision))

    leave = r.mirror.subscribe(hear)
    revisions = [r.put("a"), r.put("b"), r.delete("a")]
    await r.mirror.at_least(revisions[-1])
    assert received == [(n, n) for n in revisions]
    leave()
    await r.mirror.at_least(r.put("c"))
    assert len(received) == 3


@in_rig(rig)
async def test_an_invalid_record_does_not_end_the_mirror(r: Rig) -> None:
    others: list[WatchBatch] = []
    r.mirror.subscribe(lambda _: void(r.mirror.view.record(KEYS.root + "x", ClusterUid)))
    r.mirror.subscribe(others.append)
    await r.mirror.at_least(r.put("x", b"not a record"))
    await r.mirror.at_least(r.put("y"))
    assert len(others) == 2


def void(_: object) -> None:
    return None


@in_rig(rig)
async def test_the_mirror_catches_up_after_a_partition(r: Rig) -> None:
    r.client.partition()
    r.put("a", b"1")
    r.put("a", b"2")
    revision = r.put("b")
    r.client.heal()
    await r.mirror.at_least(revision)
    assert same(r.mirror.view, r.store)
    assert r.mirror.history.floor < revision - 2


@in_rig(rig)
async def test_a_watch_that_breaks_again_and_again_is_opened_once_it_can_be(r: Rig) -> None:
    """Meanwhile the mirror has no late watch to close, and no audit gets an answer."""
    watch = r.client.watch

    async def none() -> AsyncIterator[WatchBatch]:
        if r.client.cut_off:
            raise Unavailable("no watch today")
        yield WatchBatch(revision=0, events=())

    @asynccontextmanager
    async def broken(*_arguments: object, **_options: object) -> AsyncIterator[AsyncIterator[WatchBatch]]:
        yield none()

    r.client.watch = broken  # type: ignore[method-assign,assignment]  # a fault
    r.client.partition()
    r.client.break_watches()
    await asyncio.sleep(0.1)
    revision = r.put("a")
    r.mirror.note_revision(revision)
    await asyncio.sleep(65)
    assert r.mirror.behind_s() > 2.0
    r.client.watch = watch  # type: ignore[method-assign]
    r.client.heal()
    async with asyncio.timeout(1.0):
        await r.mirror.wait_until(lambda view: view.revision >= revision)


@in_rig(rig)
async def test_after_a_compaction_the_mirror_lists_and_reports_deletes(r: Rig) -> None:
    await r.mirror.at_least(r.put("gone"))
    received: list[WatchBatch] = []
    r.mirror.subscribe(received.append)
    r.client.partition()
    r.put("new")
    revision = r.delete("gone")
    r.store.compact(revision)
    r.client.heal()
    await r.mirror.at_least(revision)
    assert same(r.mirror.view, r.store)
    (batch,) = (b for b in received if b.events)
    assert [(e.kv.key.rpartition("/")[2], e.deleted) for e in batch.events] == [
        ("new", False),
        ("gone", True),
    ]
    assert r.mirror.history.floor == batch.revision == revision


@in_virtual_time()
async def test_fresh_brings_the_view_to_the_newest_revision() -> None:
    async with rig(network=Scripted(watch_s=0.05)) as r:
        revision = r.put("a")
        assert r.mirror.view.revision < revision
        assert await r.mirror.fresh() == revision
        assert r.get("a") is not None


@in_rig(rig)
async def test_fresh_does_not_wait_for_progress_on_foreign_revisions(r: Rig) -> None:
    foreign = put(r.store, "/elsewhere/key")
    before = now()
    assert await r.mirror.fresh() == foreign
    assert now() - before < 1, "a progress notice comes only after seconds"
    # a revision that was proved once stays known
    before = now()
    await r.mirror.at_least(foreign)
    assert now() == before


@in_virtual_time()
async def test_an_unreported_write_or_delete_is_no_foreign_revision() -> None:
    async with rig(network=Scripted(watch_s=1.0)) as r:
        for change in (r.put, r.delete):
            before, revision = now(), change("a")
            foreign = put(r.store, "/elsewhere/key")
            assert await r.mirror.fresh() == foreign
            assert r.mirror.view.revision >= revision
            assert now() - before >= 1


def slow_reads(call: Call) -> Fate:
    """Make etcd answer reads after 100 ms."""
    return Fate(delay_s=0.05, answer_delay_s=0.05) if call.kind == "read" else Fate()


@in_virtual_time()
async def test_concurrent_calls_of_fresh_share_a_read_begun_after_them() -> None:
    network = Scripted(slow_reads)
    async with rig(network=network) as r:
        network.begin()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(r.mirror.fresh())
            await asyncio.sleep(0.06)  # its read has already taken effect
            later = r.put("a")
            others = [tasks.create_task(r.mirror.fresh()) for _ in range(10)]
        assert first.result() < later
        assert all(other.result() >= later for other in others)
        assert network.reads == 2


@in_virtual_time()
async def test_a_watch_that_is_only_late_is_awaited_without_a_list() -> None:
    network = Scripted(slow_reads, watch_s=2.0)
    async with rig(network=network) as r:
        network.begin()
        revision = 0
        for _ in range(40):
            revision = r.put("a")
            await asyncio.sleep(0.05)
        await r.mirror.at_least(revision)
        assert network.reads == 0
        assert r.mirror.view.revision >= revision


@in_virtual_time()
async def test_an_idle_replica_detects_that_its_cluster_was_replaced() -> None:
    """The replica's watch delivers nothing, because it waits for a revision that the older snapshot has not reached."""
    store, network = MemoryStore(), Scripted(watch_s=10_000.0)
    mirror = Mirror(store.client("r1", network=network), KEYS, new_uid="uid-1")
    running = asyncio.create_task(mirror.run())
    await mirror.started()
    store.execute(Txn(success=(Delete(key=KEYS.uid),)))
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(running, 3 * ASK_S)
    assert caught.group_contains(ClusterReplaced)


@in_virtual_time()
@pytest.mark.parametrize("there", [None, ClusterUid(uid="a stranger")], ids=["empty", "another cluster"])
async def test_a_resumed_replica_refuses_another_cluster_and_creates_none(there: ClusterUid | None) -> None:
    """t1: etcd holds the successor cluster. t2: etcd is wiped. t3: the replica lists it."""
    store = MemoryStore()
    if there is not None:
        store.execute(Txn(success=(Put(key=KEYS.uid, value=encode(there)),)))
    mirror = Mirror(store.client("r1"), KEYS, new_uid="uid-1", uid="0b6f.5.77")
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(mirror.run(), 1.0)
    assert caught.group_contains(ClusterReplaced)
    assert [kv.value for kv in store.read(Range(key=KEYS.uid)).kvs] == ([encode(there)] if there else [])


@in_virtual_time()
async def test_many_waiters_for_a_late_watch_share_a_few_lists() -> None:
    network = Scripted(slow_reads, watch_s=2.0)
    async with rig(network=network) as r:
        network.begin()
        revision = r.put("a")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(200):
                tasks.create_task(r.mirror.at_least(revision))
        assert r.get("a") == b"{}"
        assert network.reads <= 12


@in_virtual_time()
async def test_an_audit_counts_no_difference_for_a_silent_watch() -> None:
    """A frozen etcd member silences only the watch; calls go to another member immediately."""

    async with rig(network=Scripted(watch_s=17.0)) as r:  # the mirror reopens a watch after 15 s
        r.put("a")
        assert await r.mirror.audit() == 0
        assert r.get("a") == b"{}"


@in_virtual_time()
async def test_an_audit_finds_lost_events_counts_and_repairs_them() -> None:
    store = Forgetful()
    async with rig(store) as r:
        await r.mirror.at_least(r.put("changed", b"1"))
        await r.mirror.at_least(r.put("gone"))
        store.forgets = True
        r.put("changed", b"2")
        r.put("new")
        r.delete("gone")
        assert r.get("changed") == b"1"
        assert await r.mirror.audit() == 3
        assert r.mirror.differences == 3
        await r.mirror.wait_until(lambda view: same(view, r.store))
        assert await r.mirror.audit() == 0


async def replace_cluster(replacement: bytes | None, *, reported: bool) -> None:
    store = Forgetful()
    async with rig(store) as r:
        store.forgets = not reported
        if replacement is None:
            r.delete("uid")
        else:
            put(r.store, KEYS.uid, replacement)
        await (asyncio.Event().wait() if reported else r.mirror.fresh())


@pytest.mark.parametrize("replacement", [encode(ClusterUid(uid="another")), None])
@pytest.mark.parametrize("reported", [True, False])
def test_another_uid_ends_the_mirror_whether_a_watch_or_a_read_finds_it(
    replacement: bytes | None, reported: bool
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        virtual_time.run(replace_cluster(replacement, reported=reported))
    assert caught.group_contains(ClusterReplaced)


@in_virtual_time()
async def test_etcd_silence_includes_the_time_of_a_suspend() -> None:
    skew_s = 0.0
    mirror = Mirror(MemoryStore().client("r1"), KEYS, new_uid="uid", clock=lambda: now() + skew_s)
    mirror.note_contact()
    skew_s = 30.0
    assert mirror.silence_s() == 30.0
