"""Divides the shards of every dataset among the members of its job's world. The leader's."""

from __future__ import annotations

from typing import Final

from strata.coordinator.controllers.jobs import JobQueue
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.fence import Fence
from strata.core.datasets import plan_assignment
from strata.core.job import JobView
from strata.core.keys import ClusterKeys
from strata.core.txn import WatchBatch
from strata.observe import get_logger

log = get_logger()

AGAIN_S: Final = 0.1


class Datasets:
    """The assignment controller of one term of office."""

    name: Final = "datasets"
    tick_s: Final = 30.0

    def __init__(self, *, keys: ClusterKeys, mirror: Mirror, fence: Fence) -> None:
        self._keys = keys
        self._mirror = mirror
        self._fence = fence
        self._jobs = JobQueue(self.name, keys, frozenset({"world", "phase", "datasets"}))

    def wants(self, batch: WatchBatch) -> bool:
        return self._jobs.note(batch)

    async def turn(self) -> float | None:
        return await self._jobs.each(self._mirror.view, self._assign)

    async def _assign(self, name: str) -> float | None:
        job = JobView(self._mirror.view, self._keys.job(name))
        plan = plan_assignment(job, keys=self._keys, epoch=self._fence.epoch)
        outdated = False
        for txn in plan.txns:
            outdated |= not (await self._fence.execute(txn)).succeeded
        if plan.txns:
            log.info("datasets_assigned", job=name, reason=plan.reason)
        return AGAIN_S if outdated else None
