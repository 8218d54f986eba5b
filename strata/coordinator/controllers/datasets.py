"""Assignment of every dataset's shards to the members of its job's world. Runs on the leader."""

from __future__ import annotations

from typing import Final

from strata.coordinator.controllers.jobs import JobController
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.fence import Fence
from strata.core.datasets.assignment import plan_assignment
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.observe import get_logger

log = get_logger()

AGAIN_S: Final = 0.1


class Datasets(JobController):
    """The assignment controller of one leader term."""

    name = "datasets"
    folders = frozenset({"world", "phase", "datasets"})

    def __init__(self, *, keys: ClusterKeys, mirror: Mirror, fence: Fence) -> None:
        super().__init__(keys=keys, mirror=mirror)
        self._fence = fence

    async def work(self, name: str) -> float | None:
        job = JobView(self._mirror.view, self._keys.job(name))
        plan = plan_assignment(job, keys=self._keys, epoch=self._fence.epoch)
        outdated = False
        for txn in plan.txns:
            outdated |= not (await self._fence.execute(txn)).succeeded
        if plan.txns:
            log.info("datasets_assigned", job=name, reason=plan.reason)
        return AGAIN_S if outdated else None
