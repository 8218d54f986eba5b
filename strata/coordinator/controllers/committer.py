"""The committer: commits every complete checkpoint, and every complete copy in a further tier (PROTOCOLS 8.3).

The last two acks may come through two replicas, and neither replica then knows that the set of acks is
complete. So no replica commits in response to an ack. Every replica commits all checkpoints and copies that its
view shows as complete, after every change and at its start. Concurrent attempts do no harm: one transaction
succeeds.
"""

from __future__ import annotations

from strata.coordinator.controllers.jobs import JobController
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.core.checkpoints.copies import next_tier
from strata.core.checkpoints.lifecycle import decide_commit
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys, JobKeys
from strata.core.kv.records import CheckpointState
from strata.core.kv.txn import Decision
from strata.core.kv.view import View


class Committer(JobController):
    """The controller that commits checkpoints."""

    name = "committer"
    folders = frozenset({"checkpoints"})

    def __init__(self, *, keys: ClusterKeys, mirror: Mirror, executor: Executor) -> None:
        super().__init__(keys=keys, mirror=mirror)
        self._executor = executor

    async def work(self, name: str) -> None:
        keys = self._keys.job(name)
        # Checking the view is free; settling reads etcd before it finds nothing to do.
        if _next_commit(self._mirror.view, keys).txn is not None:
            await self._executor.settle(lambda view: _next_commit(view, keys))


def _next_commit(view: View, keys: JobKeys) -> Decision:
    """Decide this job's first possible commit of a checkpoint or of a tier; without one, return an empty decision."""
    job = JobView(view, keys)
    for entry in job.checkpoints():
        if entry.record.state is CheckpointState.OPEN:
            decision = decide_commit(job, entry)
            if decision.txn is not None:
                return decision
    return next_tier(job)
