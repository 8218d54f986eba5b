"""Clears away what has ended: keys of old generations, and members that no replica serves.

A member whose replica is gone has five seconds to come back through another one, counted from
the latest of: this leader sees it, it took office, a replica registered (PROTOCOLS 5.4). A leader
that is not sure of itself deletes none (5.5), nor anybody who is at its own door by then: it waits for
an etcd that is slow to write down that it is served here.
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
"""How long one attempt at deleting orphans may take, before it is asked again who is one: a little longer than a request
to one etcd member, which is blamed for its silence only if it has had all of that."""
CLEARING_S: Final = 5.0
"""How long a job's worlds wait for the next of several transactions that delete its orphans."""


class Housekeeping(JobController):
    """The clearing controller of one term of office."""

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
        hears: Callable[[str, str, str], bool],
    ) -> None:
        """`hears`: whether this job's worker, of this boot, has a transport at this replica, or had a moment ago."""
        super().__init__(keys=keys, mirror=mirror)
        self._fence = fence
        self._timing = timing
        self._spares_s = spares_s
        self._hears = hears
        self._orphans: dict[str, dict[Orphan, float]] = {}
        self._clearing_since_ms: dict[str, float] = {}
        self._calm_since_ms = _now_ms()

    def is_clearing(self, name: str) -> bool:
        """Tell whether members of this job are being deleted who are more than one transaction takes.

        A world that is written between two of these holds members that go a moment later, and ends by it: a few of them
        would count as so many failures of the job.
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
        """Delete what is due in one job; return when the next thing is."""
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
            return spares_s  # what this replica has not seen may be its own fault
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
                entry.name for entry in found.values() if self._hears(name, entry.name, entry.record.boot)
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
        except TimeoutError:  # who came to the door meanwhile is not to be deleted by one more try
            return AGAIN_S
        if not done:
            return AGAIN_S
        if more:
            self._clearing_since_ms[name] = _now_ms()  # it goes on: each part may take its time
            return MORE_S
        self._clearing_since_ms.pop(name, None)
        return _soonest(waits_s)

    async def _executed(self, name: str, plan: Plan) -> bool:
        """Execute a plan; return whether all of it took effect: it was outdated otherwise."""
        if plan.txns:
            results = [await self._fence.execute(txn) for txn in plan.txns]
            if not all(result.succeeded for result in results):
                return False
            log.info("cleared_away", job=name, reason=plan.reason)
        return True


def _soonest(waits_s: list[float]) -> float | None:
    """Return when to look again."""
    return min((max(wait_s, AGAIN_S) for wait_s in waits_s), default=None)


def _created(event: Event) -> bool:
    return not event.deleted and event.kv.create_revision == event.kv.mod_revision


def _now_ms() -> float:
    return asyncio.get_running_loop().time() * 1000
