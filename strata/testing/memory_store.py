"""`MemoryStore`: etcd in memory, with any number of `MemoryClient` handles.

    store = MemoryStore()
    client = store.client("replica-1")          # implements strata.core.kv.store.Store
    client.partition(); ...; client.heal()

One `MemoryStore` belongs to one event loop and uses its clock, so leases expire and watches report progress in virtual
time. All state changes are synchronous: a test may also call `store.execute` and similar methods directly, as a client
without a network.
"""

from __future__ import annotations

from strata.testing.memory_client import MemoryClient
from strata.testing.memory_etcd import MemoryEtcd
from strata.testing.network import Network


class MemoryStore(MemoryEtcd):
    """The store, and the factory of its clients."""

    def client(
        self,
        name: str = "client",
        *,
        network: Network | None = None,
        request_s: float = 1.0,
        progress_s: float = 5.0,
    ) -> MemoryClient:
        """Return a new client handle: a `Store` with its own connection to this store."""
        return MemoryClient(self, name, network=network, request_s=request_s, progress_s=progress_s)
