"""A member of three is killed or frozen while clients work: no read fails, and a watch delivers every
write once and in order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from strata.core.kv.txn import Put, Range, Txn, absent, prefix_end
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.etcd_member import EtcdMember
from strata.errors import Unavailable
from strata.etcd import EtcdStore, Timing

PREFIX = "/failover/"
LIMIT_S = 40.0
BEFORE = 50
AFTER = 300

Fault = Callable[[EtcdMember], None]


async def connect_to(cluster: EtcdCluster, victim: EtcdMember) -> EtcdStore:
    """Return a store that sends every request to the victim while the victim answers."""
    ring = [victim.endpoint, *(other for other in cluster.endpoints if other != victim.endpoint)]
    store = await EtcdStore.connect(ring, timing=Timing(chance=lambda: 0.0))
    for connection in (store._connection, store._renewals):
        for endpoint in connection.endpoints:
            await asyncio.wait_for(endpoint.channel.channel_ready(), LIMIT_S)
        assert connection._choose() is connection.endpoints[0]
    return store


async def create(store: EtcdStore, number: int) -> None:
    """Write a key once; after an unknown outcome, repeat the same guarded transaction."""
    key = f"{PREFIX}{number:06}"
    while True:
        with contextlib.suppress(Unavailable):
            await store.execute(Txn(compares=(absent(key),), success=(Put(key=key, value=b""),)))
            return


async def renew_for_ever(store: EtcdStore, lease_id: int) -> None:
    while True:
        await store.keep_alive(lease_id)


@contextlib.asynccontextmanager
async def reading(store: EtcdStore) -> AsyncIterator[list[int]]:
    """Read continuously while the body runs; the first failed read fails the test at its end."""
    revisions = [0]

    async def read() -> None:
        while True:
            revision = (await store.read(Range(key=PREFIX))).revision
            assert revision >= revisions[-1], "a linearizable read went back"
            revisions.append(revision)

    task = asyncio.create_task(read())
    try:
        yield revisions
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


@pytest.mark.parametrize("role", ["leader", "follower"])
@pytest.mark.parametrize("fault", [EtcdMember.kill, EtcdMember.pause], ids=["killed", "frozen"])
async def test_reads_continue_and_a_watch_delivers_every_event_during_failover(
    etcd_cluster: EtcdCluster, role: str, fault: Fault
) -> None:
    leader = await asyncio.to_thread(etcd_cluster.leader)
    victim = leader if role == "leader" else next(m for m in etcd_cluster.members if m is not leader)
    store = await connect_to(etcd_cluster, victim)
    total = BEFORE + AFTER
    served_by: set[str | None] = set()
    caught_up = asyncio.Event()

    async def watch() -> list[str]:
        seen: list[str] = []
        async with store.watch(PREFIX, prefix_end(PREFIX), start_revision=1) as batches:
            async for batch in batches:
                served_by.add(batches.endpoint)
                seen += [event.kv.key for event in batch.events]
                if len(seen) >= BEFORE:
                    caught_up.set()
                if len(seen) >= total:
                    return seen
        raise AssertionError("the watch ended")

    async with store, asyncio.timeout(LIMIT_S), reading(store) as revisions:
        watching = asyncio.create_task(watch())
        for number in range(BEFORE):
            await create(store, number)
        await caught_up.wait()
        assert served_by == {store._connection.endpoints[0].name}
        reads_before = len(revisions)
        fault(victim)
        for number in range(BEFORE, total):
            await create(store, number)
        assert await watching == [f"{PREFIX}{number:06}" for number in range(total)]
        assert len(revisions) > reads_before
    assert len(served_by) > 1


@pytest.mark.parametrize("fault", [EtcdMember.kill, EtcdMember.pause], ids=["killed", "frozen"])
async def test_a_lease_outlives_the_member_that_renewed_it(etcd_cluster: EtcdCluster, fault: Fault) -> None:
    leader = await asyncio.to_thread(etcd_cluster.leader)
    store = await connect_to(etcd_cluster, leader)
    async with store, asyncio.timeout(LIMIT_S):
        lease = await store.grant(30)
        await store.execute(Txn(success=(Put(key=PREFIX, value=b"", lease=lease.id),)))
        assert await store.keep_alive(lease.id) == 30
        fault(leader)
        renewed = 0
        while not renewed:
            with contextlib.suppress(Unavailable):
                renewed = await store.keep_alive(lease.id)
        assert renewed == 30
        assert (await store.read(Range(key=PREFIX))).kvs


async def test_requests_without_a_majority_fail_as_unavailable(etcd_cluster: EtcdCluster) -> None:
    leader = await asyncio.to_thread(etcd_cluster.leader)
    store = await EtcdStore.connect(etcd_cluster.endpoints, timing=Timing(request_s=0.2, read_s=0.5))
    async with store, asyncio.timeout(LIMIT_S):
        lease = await store.grant(30)
        for member in etcd_cluster.members:
            if member is not leader:
                member.kill()
        with pytest.raises(Unavailable):
            await store.execute(Txn(success=(Put(key=PREFIX, value=b""),)))
        with pytest.raises(Unavailable):
            await store.read(Range(key=PREFIX))
        # For a moment the leader still considers itself the leader and renews leases, so a renewal's answer proves
        # nothing.
        with pytest.raises(Unavailable):
            await renew_for_ever(store, lease.id)
        for member in etcd_cluster.members:
            if member is not leader:
                member.start()
        await asyncio.to_thread(etcd_cluster.wait_healthy)
        while True:
            with contextlib.suppress(Unavailable):
                await store.read(Range(key=PREFIX))
                break


async def test_a_watch_continues_after_a_restart_of_all_members(etcd_cluster: EtcdCluster) -> None:
    async with (
        await EtcdStore.connect(etcd_cluster.endpoints) as store,
        asyncio.timeout(LIMIT_S),
        store.watch(PREFIX, prefix_end(PREFIX), start_revision=1) as batches,
    ):
        await create(store, 0)
        assert [event.kv.key for event in (await anext(batches)).events] == [f"{PREFIX}000000"]
        waiting = asyncio.ensure_future(anext(batches))
        for member in etcd_cluster.members:
            member.kill()
        for member in etcd_cluster.members:
            member.start()
        await asyncio.to_thread(etcd_cluster.wait_healthy)
        await create(store, 1)
        batch = await waiting
        while not batch.events:
            batch = await anext(batches)
        assert [event.kv.key for event in batch.events] == [f"{PREFIX}000001"]
