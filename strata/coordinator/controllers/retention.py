"""Retention: marks checkpoints that a job's policy drops or that two hosts found damaged (PROTOCOLS 8.6, 8.8).

A coordinator only marks checkpoints. The hosts that store the bytes remove them: they request maintenance
tasks. The controller is level-triggered: it works on each change of a key that the policy reads. A checkpoint that
becomes too old is marked at the next check of all jobs, at most half a minute later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from strata.coordinator.controllers.jobs import JobController
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.fence import Fence
from strata.core.checkpoints.corruption import next_confirmation
from strata.core.checkpoints.retention_plan import next_tombstone
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.txn import Decision
from strata.observe import get_logger

log = get_logger()

MAX_ROUNDS: Final = 100
"""The most marks for one job in one turn; the job continues after the other jobs."""
AGAIN_S: Final = 0.1

FOLDERS: Final = frozenset(
    {"checkpoints", "retention", "pins", "tags", "latest", "workers", "rewind", "import", "worlds"}
)


class RetentionController(JobController):
    """The marking controller of one leader term."""

    name = "retention"
    folders = FOLDERS

    def __init__(
        self, *, keys: ClusterKeys, mirror: Mirror, fence: Fence, unix_now: Callable[[], float]
    ) -> None:
        super().__init__(keys=keys, mirror=mirror)
        self._fence = fence
        self._unix_now = unix_now

    async def work(self, name: str) -> float | None:
        """Mark due checkpoints of one job; return when to continue, if one turn is not enough."""
        for _ in range(MAX_ROUNDS):
            job, now = JobView(self._mirror.view, self._keys.job(name)), int(self._unix_now() * 1000)
            decision = _next(job, now)
            if decision.txn is None:
                return None
            result = await self._fence.execute(decision.txn)
            if not result.succeeded:
                return AGAIN_S
            log.info("checkpoint_marked", job=name, reason=decision.reason)
        return AGAIN_S


def _next(job: JobView, now_unix_ms: int) -> Decision:
    if (found := next_confirmation(job)).txn is not None:
        return found
    return next_tombstone(job, now_unix_ms=now_unix_ms)
