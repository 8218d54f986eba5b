"""The monitor that chooses targets of faults follows one cluster, and the next one after a loss of etcd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from strata.core.ids import InstanceId, ReplicaId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, Leader, encode
from strata.core.kv.store import Store
from strata.core.kv.txn import Put, Txn
from strata.testing.memory_store import MemoryStore
from strata.testing.virtual_time import in_virtual_time
from strata_chaos.run.cluster_monitor import ClusterMonitor

KEYS = ClusterKeys("default")


def led_by(uid: str, name: str) -> MemoryStore:
    store = MemoryStore()
    leader = Leader(instance=InstanceId("i"), replica=ReplicaId(name), address="a:1")
    puts = (
        Put(key=KEYS.uid, value=encode(ClusterUid(uid=uid))),
        Put(key=KEYS.leader, value=encode(leader)),
    )
    store.execute(Txn(success=puts))
    return store


@in_virtual_time()
async def test_the_monitor_follows_the_new_leader_after_a_loss_of_etcd() -> None:
    stores = [led_by("u.1", "coordinator-2")]

    @contextlib.asynccontextmanager
    async def again() -> AsyncIterator[Store]:
        yield stores[-1].client()

    before = led_by("u", "coordinator-1").client()
    monitor = ClusterMonitor(before, KEYS, again=again)
    running = asyncio.create_task(monitor.run())
    await monitor.started()
    assert monitor.leader() == "coordinator-1"

    monitor.detach()
    before.partition()
    await asyncio.sleep(60)
    assert monitor.leader() == "coordinator-1", "what was seen last stands"

    monitor.attach()
    await asyncio.sleep(1)
    assert monitor.leader() == "coordinator-2"
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
