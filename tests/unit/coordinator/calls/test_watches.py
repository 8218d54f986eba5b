"""A relayed watch: ordered, without gaps, resumable. A reader that is too slow gets the full state again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from strata.coordinator.calls.watches import CHUNK_BYTES, QUEUE_EVENTS
from strata.core.kv.txn import Delete, Put, Txn
from strata.errors import ClusterReplaced, Unavailable
from strata.v1.common_pb2 import Token
from strata.v1.watch_pb2 import WatchRequest, WatchResponse
from tests.unit.coordinator.rig import Forgetful, in_rig
from tests.unit.coordinator.serving_rig import JOB, Cluster, cluster, in_cluster


class RankObserver:
    """A client's state of a watch: a copy of the keys, and the token to resume from."""

    def __init__(self, c: Cluster, replica: str, prefix: str = "x/") -> None:
        self.c = c
        self.replica = replica
        self.prefix = prefix
        self.keys: dict[str, bytes] = {}
        self.token = Token()
        self.revisions: list[int] = []
        self.resyncs = 0

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[WatchResponse]]:
        request = WatchRequest(job="job", prefix=self.prefix, token=self.token)
        async with aclosing(self.c[self.replica].service.watches.watch(request)) as responses:
            yield responses

    def take(self, response: WatchResponse) -> None:
        if response.resync:
            self.keys.clear()
            self.resyncs += 1
        for event in response.events:
            if not self.resyncs or not response.resync:
                self.revisions.append(event.mod_revision)
            if event.deleted:
                del self.keys[event.key]
            else:
                self.keys[event.key] = event.value
        if response.HasField("token"):
            assert response.token.revision >= self.token.revision, "never back in time"
            self.token.CopyFrom(response.token)

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[AsyncIterator[WatchResponse]]:
        """Open the stream and take its first answer; yield the stream of the following ones."""
        async with self.stream() as responses:
            self.take(await anext(responses))
            yield responses

    async def follow(self, responses: AsyncIterator[WatchResponse], key: str) -> None:
        """Take answers until `key` is among the keys."""
        while key not in self.keys:
            self.take(await anext(responses))


def put(c: Cluster, name: str, value: bytes = b"{}") -> int:
    return c.store.execute(Txn(success=(Put(key=JOB.root + name, value=value),))).revision


@in_rig(cluster, 1)
async def test_a_watch_delivers_the_state_and_then_every_change_in_order(c: Cluster) -> None:
    put(c, "x/1", b"one")
    put(c, "y/1")
    await c["r1"].context.mirror.fresh()
    watcher = RankObserver(c, "r1")
    async with watcher.begun() as responses:
        assert (watcher.resyncs, watcher.keys) == (1, {"x/1": b"one"})
        for number in range(50):
            put(c, "x/2", str(number).encode())
            put(c, "y/2")
        c.store.execute(Txn(success=(Delete(key=JOB.root + "x/1"),)))
        put(c, "x/end")
        await watcher.follow(responses, "x/end")
    assert watcher.keys == {"x/2": b"49", "x/end": b"{}"}
    assert watcher.resyncs == 1
    assert watcher.revisions == sorted(set(watcher.revisions)), "in order, nothing twice"
    assert len(watcher.revisions) == 52


@in_cluster(RankObserver, "r1", replicas=2)
async def test_a_watch_is_resumed_at_another_replica_without_a_gap(c: Cluster, watcher: RankObserver) -> None:
    async with watcher.begun() as responses:
        put(c, "x/1")
        await watcher.follow(responses, "x/1")
    put(c, "x/2")
    put(c, "x/3")
    watcher.replica = "r2"
    async with watcher.stream() as responses:
        put(c, "x/4")
        await watcher.follow(responses, "x/4")
    assert sorted(watcher.keys) == ["x/1", "x/2", "x/3", "x/4"]
    assert watcher.resyncs == 1
    assert len(watcher.revisions) == 4


@in_cluster(RankObserver, "r1", replicas=1)
async def test_a_token_older_than_the_history_is_answered_with_the_whole_state(
    c: Cluster, watcher: RankObserver
) -> None:
    async with watcher.stream() as responses:
        watcher.take(await anext(responses))
    put(c, "x/1")
    await c.start("r2")
    watcher.replica = "r2"  # the history of r2 begins after that change
    async with watcher.stream() as responses:
        watcher.take(await anext(responses))
    assert (watcher.resyncs, sorted(watcher.keys)) == (2, ["x/1"])


@in_cluster(RankObserver, "r1", replicas=1)
async def test_a_watch_reader_that_is_too_slow_is_resynced_with_the_whole_state(
    c: Cluster, watcher: RankObserver
) -> None:
    async with watcher.begun() as responses:
        for number in range(QUEUE_EVENTS + 1):
            put(c, f"x/{number}")
        await c["r1"].context.mirror.fresh()
        put(c, "x/end")
        first = await anext(responses)
        assert first.resync, "before anything else is said, a token above all"
        watcher.take(first)
        await watcher.follow(responses, "x/end")
    assert watcher.resyncs == 2
    assert len(watcher.keys) == QUEUE_EVENTS + 2


@in_rig(cluster, 1)
async def test_a_large_state_comes_in_parts_and_only_the_last_has_a_token(c: Cluster) -> None:
    for number in range(40):
        put(c, f"x/{number:03}", b"x" * 60_000)
    await c["r1"].context.mirror.fresh()
    watcher = RankObserver(c, "r1")
    parts: list[WatchResponse] = []
    async with watcher.stream() as responses:
        while not parts or not parts[-1].HasField("token"):
            parts.append(await anext(responses))
            watcher.take(parts[-1])
    assert [p.resync for p in parts] == [True, *[False] * 9]
    assert all(p.ByteSize() <= CHUNK_BYTES for p in parts)
    assert len(watcher.keys) == 40


@in_cluster(RankObserver, "r1", replicas=1)
async def test_a_key_created_and_deleted_while_disconnected_causes_a_resync(
    c: Cluster, watcher: RankObserver
) -> None:
    async with watcher.begun() as responses:
        put(c, "x/1")
        await watcher.follow(responses, "x/1")
        c["r1"].client.partition()
        deleted = JOB.root + "x/gone"
        put(c, "x/gone")
        c.store.execute(Txn(success=(Delete(key=deleted),)))
        c.store.compact(put(c, "elsewhere"))
        c["r1"].client.heal()
        while watcher.resyncs < 2:
            watcher.take(await anext(responses))
    assert watcher.keys == {"x/1": b"{}"}


@asynccontextmanager
async def forgetful() -> AsyncIterator[tuple[Cluster, Forgetful]]:
    store = Forgetful()
    async with cluster(1, store=store) as c:
        yield c, store


@in_rig(forgetful)
async def test_an_audit_repair_at_an_already_delivered_revision_causes_a_resync(
    rig: tuple[Cluster, Forgetful],
) -> None:
    c, store = rig
    watcher = RankObserver(c, "r1")
    async with watcher.begun() as responses:
        put(c, "x/1", b"old")
        await watcher.follow(responses, "x/1")
        store.forgets = True
        put(c, "x/1", b"new")
        store.forgets = False
        put(c, "x/2")
        await watcher.follow(responses, "x/2")
        assert watcher.keys["x/1"] == b"old"
        assert await c["r1"].context.mirror.audit() == 1
        while watcher.resyncs < 2:
            watcher.take(await anext(responses))
    assert watcher.keys == {"x/1": b"new", "x/2": b"{}"}
    c["r1"].context.mirror.differences = 0  # this difference was intended


@in_cluster(RankObserver, "r1", replicas=1)
async def test_a_quiet_watch_reports_its_revision(c: Cluster, watcher: RankObserver) -> None:
    async with watcher.begun() as responses:
        other = put(c, "y/1")
        watcher.take(await anext(responses))
        assert watcher.token.revision >= other


@in_cluster(RankObserver, "r1", replicas=1)
async def test_a_watch_of_another_cluster_or_at_a_stopping_replica_ends_with_the_reason(
    c: Cluster, watcher: RankObserver
) -> None:
    watcher.token.uid = "another"
    async with watcher.stream() as responses:
        with pytest.raises(ClusterReplaced):
            await anext(responses)
    watcher.token.Clear()
    async with watcher.stream() as responses:
        c["r1"].replica.stop()
        with pytest.raises(Unavailable, match="stops"):
            await watcher.follow(responses, "x/never")
