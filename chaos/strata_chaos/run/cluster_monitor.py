"""The present keyspace of the cluster: faults find their targets in it, and recovery is measured by it.

The monitor uses the replicas' own mirror of etcd. Checkers do not use the monitor: they read the observer's record.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from strata.coordinator.view.mirror import Mirror
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Leader, PoisonRecord, Replica
from strata.core.kv.store import Store
from strata.core.kv.txn import WatchBatch

Again = Callable[[], AbstractAsyncContextManager[Store]]


class ClusterMonitor:
    """Follows one cluster. `run` keeps it up to date until cancelled.

    A fault that replaces etcd calls `detach` before the loss, and `attach` once the new cluster is up. The monitor
    then follows the new cluster through a store that `again` opens. Between the two calls the monitor keeps its last
    state.
    """

    def __init__(self, store: Store, keys: ClusterKeys, *, again: Again | None = None) -> None:
        self.keys = keys
        self._again = again
        self._releases: Counter[str] = Counter()
        self._mirror = self._new_mirror(store)
        self._following: asyncio.Task[None] | None = None
        self._attached = asyncio.Event()
        self._attached.set()

    def _new_mirror(self, store: Store) -> Mirror:
        mirror = Mirror(
            store, self.keys, new_uid="never-used"
        )  # a coordinator or a restore has already made the uid
        mirror.subscribe(self._count_releases)
        return mirror

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._follow()
        while True:
            await self._attached.wait()
            assert self._again is not None
            async with self._again() as store:
                self._mirror = self._new_mirror(store)
                await self._follow()

    async def _follow(self) -> None:
        """Follow this mirror until `detach`."""
        self._following = asyncio.create_task(self._mirror.run())
        try:
            await asyncio.wait({self._following})
            if not self._following.cancelled():
                self._following.result()  # raises the mirror's error: a mirror ends only with an error
        finally:
            self._following.cancel()

    def detach(self) -> None:
        """Stop following etcd: a fault is about to replace it."""
        self._attached.clear()
        if self._following is not None:
            self._following.cancel()

    def attach(self) -> None:
        """Follow the present etcd."""
        self._attached.set()

    async def started(self) -> None:
        """Wait until the keyspace is known."""
        await self._mirror.started()

    # -- leader

    def leader(self) -> str | None:
        """Return the coordinator that holds the leader key, or None."""
        held = self._leader()
        return held.replica if held is not None else None

    def holds_lead(self) -> bool:
        """Return whether the instance that the leader key names is registered, and so may be alive."""
        held = self._leader()
        return held is not None and held.instance in self.replicas().values()

    def epoch(self) -> int:
        """Return the create revision of the leader key; 0 if there is none."""
        kv = self._mirror.view.get(self.keys.leader)
        return kv.create_revision if kv is not None else 0

    def _leader(self) -> Leader | None:
        try:
            return self._mirror.view.record(self.keys.leader, Leader)
        except PoisonRecord:
            return None

    def replicas(self) -> dict[str, str]:
        """Return the instance of every registered coordinator, by name."""
        folder = self._mirror.view.entries(self.keys.replicas, Replica)
        return {entry.name: entry.record.instance for entry in folder}

    def serving(self) -> Counter[str]:
        """Return the number of members that each coordinator serves, by its name."""
        names = {instance: name for name, instance in self.replicas().items()}
        return Counter(
            names[worker.record.served_by]
            for job in self._mirror.view.names(self.keys.jobs)
            for worker in self.job(job).workers()
            if worker.record.served_by in names
        )

    # -- jobs

    def job(self, name: str) -> JobView:
        """Return the present state of one job."""
        return JobView(self._mirror.view, self.keys.job(name))

    def releases(self, job: str) -> int:
        """Return how many barrier releases of a job the monitor has seen."""
        return self._releases[job]

    def _count_releases(self, batch: WatchBatch) -> None:
        for event in batch.events:
            match self.keys.parts(event.kv.key):
                case ("jobs", job, "barriers", _, _, _, "outcome") if not event.deleted:
                    if b'"released"' in event.kv.value:
                        self._releases[job] += 1
                case _:
                    pass
