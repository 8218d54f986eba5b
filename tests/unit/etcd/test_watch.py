"""A watch, and the answers that a real etcd gives only when something fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from strata.core.kv.store import Compacted
from strata.core.kv.txn import WatchBatch
from strata.errors import ClusterReplaced, InvalidArgument, Refused, Unavailable
from strata.etcd.store import EtcdStore
from tests.unit.etcd.fake_etcd import FakeEtcd, quick, soon, store_on


@pytest.fixture
async def one() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as fake:
        yield fake


@pytest.fixture
async def other() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as fake:
        yield fake


def revisions(batch: WatchBatch) -> list[int]:
    return [event.kv.mod_revision for event in batch.events]


async def test_a_watch_requires_a_leader_and_opens_at_its_position(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, create = await one.next_watch()
        session.send(one.events(5))
        batch = await soon(reading)
    assert session.metadata["hasleader"] == "true"
    assert (create.key, create.range_end, create.start_revision) == (b"k", b"l", 4)
    assert create.fragment
    assert revisions(batch) == [5]


async def test_the_position_is_the_last_event_and_not_the_header(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.events(5, 6, header=90))
        assert (await soon(reading)).revision == 6
        session.send(one.events(7, header=90))
        assert revisions(await soon(anext(watch))) == [7]


async def test_fragments_become_one_batch(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.events(5, 5, fragment=True))
        session.send(one.events(5, 5, fragment=True))
        session.send(one.events(5))
        assert revisions(await soon(reading)) == [5, 5, 5, 5, 5]


async def test_half_a_revision_dies_with_its_stream(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.events(5, 5, fragment=True))
        session.end(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
        session, create = await one.next_watch()
        session.send(one.events(5, 5, 5))
        assert revisions(await soon(reading)) == [5, 5, 5]
    assert create.start_revision == 4


@pytest.mark.parametrize("end", ["canceled", "error"])
async def test_a_break_resumes_elsewhere_without_gap_or_duplicate(
    one: FakeEtcd, other: FakeEtcd, end: str
) -> None:
    async with store_on(one, other) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.events(5, 6))
        assert revisions(await soon(reading)) == [5, 6]
        if end == "canceled":
            session.send(one.canceled("etcdserver: watch was canceled for some reason"))
        else:
            session.end(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
        reading = asyncio.ensure_future(anext(watch))
        session, create = await other.next_watch()
        session.send(other.events(6, 7))
        assert revisions(await soon(reading)) == [7]
        assert create.start_revision == 6
        assert (watch.endpoint, watch.breaks) == (other.address, 1)


async def leave_by(error: type[Exception] | None, store: EtcdStore, one: FakeEtcd) -> None:
    """Read one revision, then leave the watch: by raising `error`, or by a deadline that cancels a read."""
    async with store.watch("k", "l", start_revision=5) as watch, asyncio.timeout(None) as scope:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.events(5))
        await soon(reading)
        if error is not None:
            raise error
        scope.reschedule(asyncio.get_running_loop().time())
        await anext(watch)


@pytest.mark.parametrize("late", [True, False])
async def test_after_a_watch_times_out_the_next_watch_uses_another_member(
    one: FakeEtcd, other: FakeEtcd, late: bool
) -> None:
    async with store_on(one, other) as store:
        error = TimeoutError if late else ValueError
        with pytest.raises(error):
            await leave_by(error, store, one)
        next_one, spared = (other, one) if late else (one, other)
        async with store.watch("k", "l", start_revision=6) as watch:
            reading = asyncio.ensure_future(anext(watch))
            session, create = await next_one.next_watch()
            session.send(next_one.events(6))
            assert revisions(await soon(reading)) == [6]
            assert (create.start_revision, watch.endpoint) == (5, next_one.address)
            assert spared.watches.empty(), "not asked first, and left for its silence"


async def test_a_read_deadline_also_moves_the_next_watch_to_another_member(
    one: FakeEtcd, other: FakeEtcd
) -> None:
    async with store_on(one, other) as store:
        with pytest.raises(TimeoutError):
            await leave_by(None, store, one)
        async with store.watch("k", "l", start_revision=6) as watch:
            reading = asyncio.ensure_future(anext(watch))
            session, _ = await other.next_watch()
            session.send(other.events(6))
            assert revisions(await soon(reading)) == [6]
            assert one.watches.empty(), "not asked first, and left for its silence"


async def test_compaction_behind_the_position_is_survived(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, create = await one.next_watch()
        assert create.start_revision == 4
        session.send(one.canceled(compact_revision=5))
        session, create = await one.next_watch()
        assert create.start_revision == 5
        session.send(one.events(5))
        assert revisions(await soon(reading)) == [5]


async def test_compaction_of_needed_revisions_is_reported(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.canceled(compact_revision=9))
        with pytest.raises(Compacted, match="9 is the oldest"):
            await soon(reading)


async def test_progress_is_requested_and_moves_the_position(one: FakeEtcd) -> None:
    timing = quick(progress_s=0.02)
    async with store_on(one, timing=timing) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        assert (await session.request()).HasField("progress_request")
        session.send(one.progress(30))
        assert await soon(reading) == WatchBatch(revision=30)
        session.end(grpc.StatusCode.UNAVAILABLE, "gone")
        reading = asyncio.ensure_future(anext(watch))
        session, create = await one.next_watch()
        assert create.start_revision == 30
        session.send(one.events(31))
        assert revisions(await soon(reading)) == [31]


async def test_progress_never_goes_back(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.progress(3))
        session.send(one.events(5))
        assert revisions(await soon(reading)) == [5]


async def test_progress_of_an_old_etcd_is_only_a_sign_of_life(one: FakeEtcd) -> None:
    one.version = "3.5.7"
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.progress(30))
        session.send(one.events(5))
        assert revisions(await soon(reading)) == [5]


async def test_silence_is_a_break(one: FakeEtcd, other: FakeEtcd) -> None:
    timing = quick(progress_s=0.02, silence_s=0.1)
    async with store_on(one, other, timing=timing) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        silent, _ = await one.next_watch()
        session, _ = await other.next_watch()
        session.send(other.events(5))
        assert revisions(await soon(reading)) == [5]
        await soon(silent.ended.wait())


async def test_a_member_that_fails_calls_loses_its_watch_if_it_does_not_answer(
    one: FakeEtcd, other: FakeEtcd
) -> None:
    timing = quick(open_s=0.1)
    async with store_on(one, other, timing=timing) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        suspect, _ = await one.next_watch()
        suspect.send(one.events(5))
        await soon(reading)
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        store._connection.blame(store._connection.endpoints[0])
        assert (await suspect.request()).HasField("progress_request")
        session, _ = await other.next_watch()
        session.send(other.events(6))
        assert revisions(await soon(reading)) == [6]


async def test_a_member_that_fails_calls_keeps_its_watch_if_it_answers(
    one: FakeEtcd, other: FakeEtcd
) -> None:
    timing = quick(open_s=0.2)
    async with store_on(one, other, timing=timing) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.events(5))
        await soon(reading)
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        store._connection.blame(store._connection.endpoints[0])
        assert (await session.request()).HasField("progress_request")
        session.send(one.progress(8))
        assert await soon(reading) == WatchBatch(revision=8)
        assert watch.breaks == 0


async def test_a_member_of_an_older_term_is_left(one: FakeEtcd, other: FakeEtcd) -> None:
    async with store_on(one, other) as store:
        store._connection.guard.term = 9
        other.term = 9
        async with store.watch("k", "l", start_revision=5) as watch:
            reading = asyncio.ensure_future(anext(watch))
            await one.next_watch()
            session, _ = await other.next_watch()
            session.send(other.events(5))
            assert revisions(await soon(reading)) == [5]


async def test_another_cluster_ends_the_watch(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        one.cluster_id = 8
        reading = asyncio.ensure_future(anext(watch))
        await one.next_watch()
        with pytest.raises(ClusterReplaced):
            await soon(reading)


GO = "rpc error: code = PermissionDenied desc = "


@pytest.mark.parametrize("reason", ["etcdserver: permission denied", GO + "etcdserver: permission denied"])
async def test_a_watch_without_permission_is_refused(one: FakeEtcd, reason: str) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.canceled(reason))
        with pytest.raises(Refused, match="permission denied"):
            await soon(reading)


async def test_a_stale_token_is_renewed_and_the_watch_goes_on(one: FakeEtcd) -> None:
    async with store_on(one, user="u") as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        assert session.metadata["token"] == "token-1"
        session.send(one.canceled("etcdserver: invalid auth token"))
        session, _ = await one.next_watch()
        assert session.metadata["token"] == "token-2"
        session.send(one.events(5))
        assert revisions(await soon(reading)) == [5]


async def test_cancelling_a_watch_read_loses_no_event(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        session, _ = await one.next_watch()
        session.send(one.events(5))
        await soon(reading)
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        session.send(one.events(6))
        assert revisions(await soon(anext(watch))) == [6]
        assert watch.breaks == 0


async def test_leaving_the_context_ends_the_stream(one: FakeEtcd) -> None:
    async with store_on(one) as store:
        async with store.watch("k", "l", start_revision=5) as watch:
            reading = asyncio.ensure_future(anext(watch))
            session, _ = await one.next_watch()
            session.send(one.events(5))
            await soon(reading)
        await soon(session.ended.wait())


async def test_closing_the_store_ends_the_watch(one: FakeEtcd) -> None:
    async with store_on(one) as store, store.watch("k", "l", start_revision=5) as watch:
        reading = asyncio.ensure_future(anext(watch))
        await one.next_watch()
        await store.close()
        with pytest.raises(Unavailable, match="closed"):
            await soon(reading)


async def test_a_watch_from_revision_0_is_refused(one: FakeEtcd) -> None:
    async with store_on(one) as store:
        with pytest.raises(InvalidArgument, match="above 0"):
            store.watch("k", None, start_revision=0)
