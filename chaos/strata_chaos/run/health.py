"""Health check of the whole system, before the first fault and after each healing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from strata.client import CoordinatorClient
from strata.config import Credentials
from strata.devcluster.local_cluster import LocalCoordinator
from strata.errors import StrataError
from strata_chaos.run.system import System
from strata_chaos.scenario import Workload

_POLL_S = 0.1
_ANSWER_S = 1.0


class Health:
    """Checks one system. `workloads` are the running workloads, by job."""

    def __init__(
        self,
        system: System,
        workloads: Mapping[str, Workload],
        *,
        credentials: Credentials,
        clock: Callable[[], float],
    ) -> None:
        self._credentials = credentials
        self._system = system
        self._workloads = workloads
        self._clock = clock
        self._clients: dict[str, CoordinatorClient] = {}

    def close(self) -> None:
        """Close the connections to the coordinators."""
        for client in self._clients.values():
            client.close()

    async def wait_healthy(self, limit_s: float) -> tuple[float, list[str]]:
        """Wait at most `limit_s` until the system is healthy; return the seconds waited and the remaining problems.

        Healthy means: there are no problems, and every job with barriers has had a release since this call.
        """
        begin_s = self._clock()
        before = {job: self._system.monitor.releases(job) for job in self._barrier_jobs()}
        while True:
            wrong = await self.problems()
            wrong += [
                f"job {job}: no barrier was released since"
                for job, count in before.items()
                if self._system.monitor.releases(job) == count
            ]
            took_s = self._clock() - begin_s
            if not wrong or took_s >= limit_s:
                return took_s, wrong
            await asyncio.sleep(_POLL_S)

    async def problems(self) -> list[str]:
        """Return the problems at this moment, in words."""
        etcd, coordinators = await asyncio.gather(
            asyncio.gather(*(asyncio.to_thread(m.healthy) for m in self._system.etcd.values())),
            asyncio.gather(
                *(asyncio.to_thread(self._problem_of, c) for c in self._system.coordinators.values())
            ),
        )
        wrong = [
            f"{name} is not healthy" for name, fine in zip(self._system.etcd, etcd, strict=True) if not fine
        ]
        wrong += [problem for problem in coordinators if problem]
        leader = self._system.leader()
        if leader is None:
            wrong.append("there is no leader")
        elif not self._system.monitor.holds_lead():
            wrong.append(f"the leader key names {leader}, which has ended")
        for job, workload in self._workloads.items():
            wrong += self._job(job, workload)
        return wrong

    def _problem_of(self, coordinator: LocalCoordinator) -> str:
        """Return why a coordinator does not run, or the problem that it reports; empty if there is none."""
        if coordinator.child.poll() is not None:
            return f"{coordinator.name} {coordinator.child.describe()}"
        client = self._clients.get(coordinator.name)
        if client is None:
            client = CoordinatorClient.connect(
                coordinator.address, timeout_s=_ANSWER_S, credentials=self._credentials
            )
            self._clients[coordinator.name] = client
        try:
            replicas = client.status().replicas
        except StrataError as error:
            # a client that has failed would not retry within the time of this check
            self._clients.pop(coordinator.name).close()
            return f"{coordinator.name} does not answer: {error.message}"
        for replica in replicas:
            if replica.replica == coordinator.name:
                return "" if replica.ready else f"{coordinator.name} is not ready: {replica.not_ready_reason}"
        return f"{coordinator.name} is not registered"

    def _job(self, job: str, workload: Workload) -> Sequence[str]:
        if not workload.members:
            return ()
        view = self._system.monitor.job(job)
        workers = view.workers()
        if len(workers) < workload.members:
            return (f"job {job} has {len(workers)} members of {workload.members}",)
        serving = set(self._system.monitor.replicas().values())
        if orphans := [entry.name for entry in workers if entry.record.served_by not in serving]:
            return (f"job {job}: no replica serves {', '.join(orphans)}",)
        head = view.head()
        if head is None or head.record.members < workload.members:
            return (f"job {job} has no complete world",)
        return ()

    def _barrier_jobs(self) -> list[str]:
        return [job for job, workload in self._workloads.items() if workload.barriers]
