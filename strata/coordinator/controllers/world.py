"""The world controller: turns the members of each job into a world, and proves that the leader is alive.

`plan_world` decides. This controller measures time and executes the plan under the fence. It also beats for the
controller watchdog: a leader whose world controller makes no turns must not renew its lease.

A new world replaces the old one in four steps:

1. The controller commits the complete saves, so that the new world begins from them.
2. It aborts the other saves.
3. It writes the new head (the record of the new world's generation).
4. It aborts any save that began between steps 2 and 3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from strata.coordinator.controllers.jobs import JobController
from strata.coordinator.leadership.controller_watchdog import ControllerWatchdog
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.fence import Fence
from strata.core.checkpoints.lifecycle import decide_close
from strata.core.housekeeping import first_seen
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys, JobKeys
from strata.core.stop.last_step import STOP_BARRIER
from strata.core.stop.requests import revisions
from strata.core.worlds.planning import WorldPlan, needs_settling, plan_world
from strata.observe import get_logger

log = get_logger()

TURN_S: Final = 0.5
"""The longest time between two turns, so that the last beat is never older than this."""
CLEARING_POLL_S: Final = 0.05
MAX_ROUNDS: Final = 20
"""The most plans of one job in one turn. If these are not enough, the job's keys change as fast as the leader plans."""

FOLDERS: Final = frozenset({"spec", "phase", "workers", "world", "worlds", "latest", "rewind"})


class Worlds(JobController):
    """The world controller of one leader term."""

    name = "worlds"
    tick_s = TURN_S
    folders = FOLDERS
    barriers = frozenset({STOP_BARRIER})
    attempts = frozenset({"suspects"})

    def __init__(
        self,
        *,
        keys: ClusterKeys,
        mirror: Mirror,
        fence: Fence,
        heartbeat: ControllerWatchdog,
        unix_now: Callable[[], float],
        is_clearing: Callable[[str], bool],
    ) -> None:
        """`is_clearing`: whether further members of this job are about to be deleted."""
        super().__init__(keys=keys, mirror=mirror)
        self._fence = fence
        self._heartbeat = heartbeat
        self._unix_now = unix_now
        self._is_clearing = is_clearing
        self._settling_since: dict[str, float] = {}
        self._requests_seen: dict[str, dict[int, float]] = {}

    async def turn(self) -> float | None:
        self._heartbeat.beat()
        return await super().turn()

    async def work(self, name: str) -> float | None:
        """Advance one job as far as its view allows; return the seconds until its settling or a notice's deadline
        ends.
        """
        keys = self._keys.job(name)
        for _ in range(MAX_ROUNDS):
            self._heartbeat.beat()
            if self._is_clearing(name):
                return CLEARING_POLL_S
            job = JobView(self._mirror.view, keys)
            request_ages_s = self._request_ages_s(job)
            wait_s = self._settling_s(job, request_ages_s)
            plan = plan_world(
                job,
                keys=self._keys,
                epoch=self._fence.epoch,
                settled=wait_s is not None and wait_s <= 0,
                request_ages_s=request_ages_s,
                now_unix_ms=int(self._unix_now() * 1000),
            )
            if plan.open_records:
                await self._close(keys, through=_generation(job), reason=plan.reason)
            elif plan.txns:
                await self._write(name, plan)
            else:
                await self._close(keys, through=_generation(job) - 1, reason="its generation ended")
                return min((each for each in (wait_s, plan.again_s) if each is not None), default=None)
        log.warning("world_does_not_settle", job=name)
        return TURN_S

    async def _write(self, name: str, plan: WorldPlan) -> None:
        """Execute a plan in order, up to the first failed compare; then the job is planned again."""
        for txn in plan.txns:
            with self._heartbeat.waiting():
                result = await self._fence.execute(txn)
            if not result.succeeded:
                log.debug("world_plan_outdated", job=name, reason=plan.reason)
                return
        log.info("world_written", job=name, reason=plan.reason, epoch=self._fence.epoch)

    async def _close(self, keys: JobKeys, *, through: int, reason: str) -> None:
        if through > 0:
            with self._heartbeat.waiting():
                await self._fence.settle(
                    lambda view: decide_close(JobView(view, keys), through_generation=through, reason=reason)
                )

    def _request_ages_s(self, job: JobView) -> Mapping[int, float]:
        """Return for how long this leader has known each request to leave; the ages affect liveness only."""
        name, now = job.keys.name, asyncio.get_running_loop().time()
        since = self._requests_seen[name] = first_seen(self._requests_seen.get(name, {}), revisions(job), now)
        return {revision: now - at for revision, at in since.items()}

    def _settling_s(self, job: JobView, request_ages_s: Mapping[int, float]) -> float | None:
        """Return how much longer the next world waits for the membership to settle; None if it need not wait.

        A new leader measures this time from zero again, which affects liveness only.
        """
        name, spec = job.keys.name, job.spec()
        if spec is None or not needs_settling(job, request_ages_s):
            self._settling_since.pop(name, None)
            return None
        now = asyncio.get_running_loop().time()
        since = self._settling_since.setdefault(name, now)
        return since + spec.record.settle_s - now


def _generation(job: JobView) -> int:
    head = job.head()
    return head.record.generation if head is not None else 0
