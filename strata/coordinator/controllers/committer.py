"""Commits every checkpoint, and every further copy of one, that is complete. Runs on every replica (PROTOCOLS 8.3).

The last two acks may come through two replicas, neither of which knew then that the set was full.
So nobody commits because of an ack: everybody commits what its view shows complete, after every
change and at the start. Replicas that try at once do no harm: one transaction succeeds.
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
    """The controller that commits."""

    name = "committer"
    folders = frozenset({"checkpoints"})

    def __init__(self, *, keys: ClusterKeys, mirror: Mirror, executor: Executor) -> None:
        super().__init__(keys=keys, mirror=mirror)
        self._executor = executor

    async def work(self, name: str) -> None:
        keys = self._keys.job(name)
        # Looking costs nothing; settling reads etcd before it finds nothing to do.
        if _next_commit(self._mirror.view, keys).txn is not None:
            await self._executor.settle(lambda view: _next_commit(view, keys))


def _next_commit(view: View, keys: JobKeys) -> Decision:
    """Decide the first commit of this job that can be made, or the first tier; settled when there is none."""
    job = JobView(view, keys)
    for entry in job.checkpoints():
        if entry.record.state is CheckpointState.OPEN:
            decision = decide_commit(job, entry)
            if decision.txn is not None:
                return decision
    return next_tier(job)
