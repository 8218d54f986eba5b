"""The context that all parts of one replica share; `Replica` makes it once."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from strata.config import CoordinatorConfig
from strata.coordinator.access.connection_limiter import ConnectionReport
from strata.coordinator.etcd.members import EtcdMember
from strata.coordinator.leadership.election import Election
from strata.coordinator.leadership.replica_health import Health
from strata.coordinator.leadership.takeover import Deposition
from strata.coordinator.measures import Measures
from strata.coordinator.reports.charts import Charts
from strata.coordinator.reports.save_times import SaveTimes
from strata.coordinator.view.invariant_audit import InvariantAudit
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.core.access.authority import Identity
from strata.core.ids import InstanceId, ReplicaId
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.store import Store
from strata.core.timing import Timing
from strata.errors import NotFound

ReadResource = Callable[[str, Identity | None], Awaitable[bytes]]
"""Returns the resource at a path of the HTTP API. Raises an error if there is none, or the caller may not read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaContext:
    """One running replica. Everything in it lives as long as `Replica.run`.

    `is_ready` returns whether members may be sent to this replica, and the reason if not. `outage` returns the
    reason why no replica can write to etcd, or an empty string. `clock` also counts time in suspend. The status
    in `etcd_members` is some seconds old. `unix_now` is the wall clock in seconds, for display and names only:
    measure spans with the event loop's time.
    """

    config: CoordinatorConfig
    keys: ClusterKeys
    store: Store
    mirror: Mirror
    executor: Executor
    election: Election
    deposition: Deposition
    health: Health
    timing: Timing
    replica: ReplicaId
    instance: InstanceId
    is_ready: Callable[[], tuple[bool, str]]
    outage: Callable[[], str]
    invariants: InvariantAudit
    clock: Callable[[], float]
    etcd_members: Callable[[], Sequence[EtcdMember]]
    unix_now: Callable[[], float]
    rng: random.Random
    charts: Charts
    save_times: SaveTimes
    measures: Measures = field(default_factory=Measures)
    connections: ConnectionReport = field(default_factory=ConnectionReport)

    def job(self, name: str) -> JobView:
        """Return a job as the view shows it, whether it exists or not."""
        return JobView(self.mirror.view, self.keys.job(name))


class Serving(Protocol):
    """The serving half of a replica, as `Replica` drives it: start, run, stop, in this order."""

    async def start(self) -> str:
        """Bind and serve; return the `host:port` that clients and peers connect to.

        Raise `ConfigError` if the port is taken. When this returns, the port answers.
        """
        ...

    async def run(self) -> None:
        """Run the background tasks of serving (ticks, links to peers) until cancelled."""
        ...

    async def stop(self) -> None:
        """Accept no new session, end the open ones so that their members connect to other replicas, close the port."""
        ...


async def existing_job(context: ReplicaContext, name: str) -> JobView:
    """Return an existing job; `NotFound` if no job has that name."""
    job = context.job(name)
    if not job.exists:
        await context.mirror.fresh()
    if not job.exists:
        raise NotFound(f"no job {name} exists", hint="a job begins with its first member")
    return job
