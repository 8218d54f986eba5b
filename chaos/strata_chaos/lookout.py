"""What is going on right now, for aiming faults and measuring recovery: the keyspace, as it changes.

It uses the replicas' own mirror of etcd. Nothing here judges: the observer keeps a record of its own,
which the checkers read.
"""

from __future__ import annotations

from collections import Counter

from strata.coordinator.view.mirror import Mirror
from strata.core.job import JobView
from strata.core.keys import ClusterKeys
from strata.core.records import Leader, PoisonRecord, Replica
from strata.core.store import Store
from strata.core.txn import WatchBatch


class Lookout:
    """Follows one cluster. `run` feeds it until cancelled."""

    def __init__(self, store: Store, keys: ClusterKeys) -> None:
        self.keys = keys
        self._mirror = Mirror(store, keys, new_uid="never-used")  # coordinators have made one
        self._releases: Counter[str] = Counter()
        self._mirror.subscribe(self._look)

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._mirror.run()

    async def started(self) -> None:
        """Return once the keyspace is known."""
        await self._mirror.started()

    # -- who leads

    def leader(self) -> str | None:
        """Return the coordinator that holds the leader key, or None."""
        held = self._leader()
        return held.replica if held is not None else None

    def holds_office(self) -> bool:
        """Whether the instance that the leader key names is registered, so that it may be alive."""
        held = self._leader()
        return held is not None and held.instance in self.replicas().values()

    def epoch(self) -> int:
        """Return the create revision of the leader key; 0 while there is none."""
        kv = self._mirror.view.get(self.keys.leader)
        return kv.create_revision if kv is not None else 0

    def _leader(self) -> Leader | None:
        try:
            return self._mirror.view.record(self.keys.leader, Leader)
        except PoisonRecord:
            return None

    def replicas(self) -> dict[str, str]:
        """Return the instance of every coordinator that is registered, by name."""
        folder = self._mirror.view.entries(self.keys.replicas, Replica)
        return {entry.name: entry.record.instance for entry in folder}

    def serving(self) -> Counter[str]:
        """Return how many members each coordinator serves, by its name."""
        names = {instance: name for name, instance in self.replicas().items()}
        return Counter(
            names[worker.record.served_by]
            for job in self._mirror.view.names(self.keys.jobs)
            for worker in self.job(job).workers()
            if worker.record.served_by in names
        )

    # -- jobs

    def job(self, name: str) -> JobView:
        """Return one job as it is now."""
        return JobView(self._mirror.view, self.keys.job(name))

    def releases(self, job: str) -> int:
        """Return how many barriers of a job were seen released."""
        return self._releases[job]

    def _look(self, batch: WatchBatch) -> None:
        for event in batch.events:
            match self.keys.parts(event.kv.key):
                case ("jobs", job, "barriers", _, _, _, "outcome") if not event.deleted:
                    if b'"released"' in event.kv.value:
                        self._releases[job] += 1
                case _:
                    pass
