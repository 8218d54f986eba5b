"""One replica's insides on the in-memory store: what the tests of this folder start from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.core.keys import ClusterKeys
from strata.core.txn import Delete, Put, Txn
from strata.testing.memory_client import MemoryClient
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Network

KEYS = ClusterKeys("test")


class Rig:
    """A store, a client of it, a mirror and an executor, running inside `rig()`."""

    def __init__(self, store: MemoryStore, client: MemoryClient) -> None:
        self.store = store
        self.client = client
        self.mirror = Mirror(client, KEYS, new_uid="uid-1")
        self.executor = Executor(client, self.mirror)

    def put(self, name: str, value: bytes = b"{}") -> int:
        """Write below the root as somebody else; return the revision."""
        return put(self.store, KEYS.root + name, value)

    def delete(self, name: str) -> int:
        return self.store.execute(Txn(success=(Delete(key=KEYS.root + name),))).revision

    def get(self, name: str) -> bytes | None:
        """Return what the view holds."""
        kv = self.mirror.view.get(KEYS.root + name)
        return kv.value if kv is not None else None


def put(store: MemoryStore, key: str, value: bytes = b"{}") -> int:
    return store.execute(Txn(success=(Put(key=key, value=value),))).revision


@asynccontextmanager
async def rig(
    store: MemoryStore | None = None, *, network: Network | None = None, name: str = "r1"
) -> AsyncIterator[Rig]:
    """Run a mirror and an executor; yield once the view is there."""
    store = store or MemoryStore()
    made = Rig(store, store.client(name, network=network))
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(made.mirror.run()), tasks.create_task(made.executor.run())]
        await made.mirror.started()
        yield made
        for task in running:
            task.cancel()
