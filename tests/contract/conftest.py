"""One suite for two stores: every test here runs on the in-memory store and on real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest

from strata.core.kv.store import Store
from strata.core.kv.txn import Event, KeyValue, Put, Range, Txn, WatchBatch, prefix_end
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.etcd import EtcdStore, Timing
from strata.testing.memory_store import MemoryStore

LIMIT_S = 10.0
PROGRESS_S = 0.2

_T = TypeVar("_T")
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def single_etcd(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A member that only the running test uses, so that only the test's own writes raise the revision.

    The election timeout is so short that etcd grants leases of one second.
    """
    cluster = EtcdCluster.start(
        tmp_path_factory.mktemp("etcd"),
        binary=etcd_binary,
        extra_args=("--heartbeat-interval=10", "--election-timeout=100"),
        fsync=False,
    )
    yield cluster
    cluster.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A store under test, with a key prefix that no other test has."""

    store: Store
    other: Store
    """A second client of the same store."""
    prefix: str

    def key(self, name: str) -> str:
        return self.prefix + name

    @property
    def end(self) -> str:
        """The end of the range of this subject's keys."""
        return prefix_end(self.prefix)

    async def put(self, *names: str, value: bytes = b"", lease: int = 0) -> int:
        """Write keys in one transaction; return its revision."""
        puts = tuple(Put(key=self.key(name), value=value, lease=lease) for name in names)
        return (await self.store.execute(Txn(success=puts))).revision

    async def get(self, name: str, *, revision: int = 0) -> KeyValue | None:
        result = await self.store.read(Range(key=self.key(name), revision=revision))
        return result.kvs[0] if result.kvs else None

    async def names(self, *, revision: int = 0) -> list[str]:
        """Return the names of all keys of this subject."""
        result = await self.store.read(Range(key=self.prefix, range_end=self.end, revision=revision))
        return [kv.key.removeprefix(self.prefix) for kv in result.kvs]

    async def head(self) -> int:
        return (await self.store.read(Range(key=self.prefix))).revision

    @contextlib.asynccontextmanager
    async def watching(self, start_revision: int, *, name: str | None = None) -> AsyncIterator[RankObserver]:
        """Watch all keys of this subject, or one."""
        key, end = (self.prefix, self.end) if name is None else (self.key(name), None)
        async with self.store.watch(key, end, start_revision=start_revision) as batches:
            yield RankObserver(batches, self.prefix, start_revision)


class RankObserver:
    """Reads a watch and checks the invariants of every batch."""

    def __init__(self, batches: AsyncIterator[WatchBatch], prefix: str, start_revision: int) -> None:
        self._batches = batches
        self._prefix = prefix
        self._seen = start_revision - 1

    async def batch(self) -> WatchBatch:
        """Return the next batch, progress notices included."""
        batch = await soon(anext(self._batches))
        revisions = [event.kv.mod_revision for event in batch.events]
        assert revisions == sorted(revisions)
        assert all(self._seen < revision <= batch.revision for revision in revisions)
        assert batch.revision >= self._seen
        self._seen = batch.revision
        return batch

    async def events(self, count: int) -> list[Event]:
        """Return the next `count` events; whole batches must contain exactly that many."""
        found: list[Event] = []
        while len(found) < count:
            found.extend((await self.batch()).events)
        assert len(found) == count
        return found

    async def changes(self, count: int) -> list[str]:
        """Return the next events as texts: `+name` for a write, `-name` for a delete."""
        return [
            ("-" if event.deleted else "+") + event.kv.key.removeprefix(self._prefix)
            for event in await self.events(count)
        ]


async def soon(awaitable: Awaitable[_T]) -> _T:
    """Return the result of `awaitable`; fail after the time limit."""
    async with asyncio.timeout(LIMIT_S):
        return await awaitable


@pytest.fixture(params=["memory", "etcd"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """The store under test; each test runs once with each kind."""
    prefix = f"/contract/{next(_numbers):04}/"
    if request.param == "memory":
        store = MemoryStore(min_ttl_s=1)
        clients = [store.client(name, progress_s=PROGRESS_S) for name in ("a", "b")]
        yield Subject(store=clients[0], other=clients[1], prefix=prefix)
        return
    endpoints = request.getfixturevalue("single_etcd").endpoints
    timing = Timing(progress_s=PROGRESS_S)
    async with (
        await EtcdStore.connect(endpoints, timing=timing) as one,
        await EtcdStore.connect(endpoints, timing=timing) as two,
    ):
        yield Subject(store=one, other=two, prefix=prefix)
