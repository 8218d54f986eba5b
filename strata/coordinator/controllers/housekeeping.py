"""Garbage collection of keys: ended generations, and *orphans* (members whose replica is lost).

An orphan has five seconds to register at another replica. The five seconds count from the latest of three
events (PROTOCOLS 5.4): this leader first sees the orphan, this leader takes the lead, or a replica registers. A
leader that may be at fault itself deletes no orphan (5.5). Nor does a leader delete an orphan that already has a
transport at the leader itself: that orphan's registration only waits for a slow etcd.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from strata.coordinator.controllers.jobs import JobController
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.fence import Fence
from strata.core.housekeeping import (
    Orphan,
    first_seen,
    orphans,
    plan_ended_generations,
    plan_orphans,
)
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.txn import Event, Plan, WatchBatch
from strata.core.timing import Timing
from strata.observe import get_logger

log = get_logger()

AGAIN_S: Final = 0.1
MORE_S: Final = 0.01
ATTEMPT_S: Final = 1.2
"""Deadline of one attempt at deleting orphans; the next attempt determines the orphans again. The deadline is a
little longer than the timeout of a request to one etcd member: with less time, a silent etcd member would not
count as silent."""
CLEARING_S: Final = 5.0
"""If several transactions delete a job's orphans, how long the job's next world waits for each of them."""


class Housekeeping(JobController):
    """The garbage collection controller of one leader term."""

    name = "housekeeping"
    folders = frozenset({"workers", "world"})

    def __init__(
        self,
        *,
        keys: ClusterKeys,
        mirror: Mirror,
        fence: Fence,
        timing: Timing,
        spares_s: Callable[[], float],
        has_recent_transport: Callable[[str, str, str], bool],
    ) -> None:
        """`has_recent_transport`: whether this boot of a job's worker has a transport at this replica, or had one a moment ago."""
        super().__init__(keys=keys, mirror=mirror)
        self._fence = fence
        self._timing = timing
        self._spares_s = spares_s
        self._has_recent_transport = has_recent_transport
        self._orphans: dict[str, dict[Orphan, float]] = {}
        self._clearing_since_ms: dict[str, float] = {}
        self._calm_since_ms = _now_ms()

    def is_clearing(self, name: str) -> bool:
        """True while several transactions delete members of this job.

        A world written between two of these transactions would contain members that are deleted a moment later.
        That deletion would end the world, and each such world would count as a failure of the job.
        """
        since_ms = self._clearing_since_ms.get(name)
        return since_ms is not None and _now_ms() - since_ms < CLEARING_S * 1000

    def wants(self, batch: WatchBatch) -> bool:
        replicas = [e for e in batch.events if e.kv.key.startswith(self._keys.replicas)]
        if replicas:
            self.all_due()
        if any(_created(event) for event in replicas):
            self._calm_since_ms = _now_ms()
        return super().wants(batch) or bool(replicas)

    async def work(self, name: str) -> float | None:
        """Delete the due keys of one job; return the seconds until the next are due."""
        return min(
            (
                delay
                for delay in (await self._clean_generations(name), await self._clean_orphans(name))
                if delay is not None
            ),
            default=None,
        )

    async def _clean_generations(self, name: str) -> float | None:
        job = JobView(self._mirror.view, self._keys.job(name))
        plan = plan_ended_generations(job, keys=self._keys, epoch=self._fence.epoch)
        return None if await self._executed(name, plan) else AGAIN_S

    async def _clean_orphans(self, name: str) -> float | None:
        job, now_ms = JobView(self._mirror.view, self._keys.job(name)), _now_ms()
        if (spares_s := self._spares_s()) > 0:
            self._clearing_since_ms.pop(name, None)
            return spares_s  # members may seem lost by this replica's own fault
        found = orphans(job, keys=self._keys)
        since = self._orphans[name] = first_seen(self._orphans.get(name, {}), found, now_ms)
        plan = plan_orphans(
            job,
            keys=self._keys,
            epoch=self._fence.epoch,
            orphaned_since_ms=since,
            calm_since_ms=self._calm_since_ms,
            now_ms=now_ms,
            orphan_s=self._timing.orphan_s,
            arriving={
                entry.name
                for entry in found.values()
                if self._has_recent_transport(name, entry.name, entry.record.boot)
            },
        )
        waits_s = [
            self._timing.orphan_s - (now_ms - max(self._calm_since_ms, at_ms)) / 1000
            for at_ms in since.values()
        ]
        first = Plan(reason=plan.reason, txns=plan.txns[:1])
        if more := len(plan.txns) > 1:
            self._clearing_since_ms.setdefault(name, now_ms)
        try:
            async with asyncio.timeout(ATTEMPT_S):
                done = await self._executed(name, first)
        except TimeoutError:  # a retry must not delete members that connected here since then
            return AGAIN_S
        if not done:
            return AGAIN_S
        if more:
            self._clearing_since_ms[name] = _now_ms()  # each transaction has `CLEARING_S` of its own
            return MORE_S
        self._clearing_since_ms.pop(name, None)
        return _soonest(waits_s)

    async def _executed(self, name: str, plan: Plan) -> bool:
        """Execute a plan; return False if part of it was outdated."""
        if plan.txns:
            results = [await self._fence.execute(txn) for txn in plan.txns]
            if not all(result.succeeded for result in results):
                return False
            log.info("ended_generations_deleted", job=name, reason=plan.reason)
        return True


def _soonest(waits_s: list[float]) -> float | None:
    """Return the seconds until the next check."""
    return min((max(wait_s, AGAIN_S) for wait_s in waits_s), default=None)


def _created(event: Event) -> bool:
    return not event.deleted and event.kv.create_revision == event.kv.mod_revision


def _now_ms() -> float:
    return asyncio.get_running_loop().time() * 1000
