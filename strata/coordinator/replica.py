"""One coordinator replica, composed from its parts.

    mirror, executor                  follow the keyspace, execute decisions on it
    serving, registration             serve, and publish the address
    committer                         commit checkpoints that are complete
    election, leader_term             lead, if this replica is elected

One TaskGroup owns all of these tasks. Nothing here imports grpc: a factory supplies the transport of the
serving half, so that the simulation runs the same replica on faked links.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import structlog

from strata.config import CoordinatorConfig
from strata.coordinator.context import ReadResource, ReplicaContext, Serving
from strata.coordinator.controllers.committer import Committer
from strata.coordinator.controllers.leader_term import LeaderTerm
from strata.coordinator.controllers.loop import drive
from strata.coordinator.etcd.dry_run import DryRuns
from strata.coordinator.etcd.members import AskMembers, EtcdMember
from strata.coordinator.leadership.controller_watchdog import ControllerWatchdog
from strata.coordinator.leadership.election import Election
from strata.coordinator.leadership.registration import Registration
from strata.coordinator.leadership.replica_health import Health
from strata.coordinator.leadership.takeover import Deposition, Prober
from strata.coordinator.measures import Measures
from strata.coordinator.peers.links import Dial
from strata.coordinator.reports.charts import Charts
from strata.coordinator.reports.save_times import SaveTimes
from strata.coordinator.service import Service
from strata.coordinator.status.finding_log import FindingLog
from strata.coordinator.status.observed import Observed
from strata.coordinator.view.invariant_audit import InvariantAudit
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.coordinator.writes.measured import MeasuredStore
from strata.core.ids import InstanceId, ReplicaId, checked_id
from strata.core.kv import records
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.store import Store
from strata.core.timing import Timing
from strata.errors import ClusterReplaced, StrataError
from strata.observe import get_logger

log = get_logger()

ServingFactory = Callable[[ReplicaContext, Service, ReadResource | None], Serving]
"""Puts a service behind a transport. The third argument reads resources of the HTTP API; None serves none."""
ResourceFactory = Callable[[Observed], ReadResource]
PageFactory = Callable[[Observed], Serving]
"""Makes the HTTP server of the status page, the metrics and the probes."""

PARTING_S: Final = 3.0
"""How long a stopping replica tries to release its leadership and its own key in etcd."""


async def _no_members() -> Sequence[EtcdMember]:
    return ()


class Replica:
    """One replica, from its first read of the keyspace to the removal of its own key; `run` is its life.

    `renewals` is the store handle for the leader's lease and campaigns only; `store` is for everything else.
    Each has a channel of its own, so that renewals wait for nothing else. `probe` is the TCP connect by which a
    dead leader is recognised. `instance` and `new_uid` are fresh random names. `uid`, if given, is the only
    cluster that this replica may serve. `clock` also counts time in suspend.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        serving: ServingFactory,
        dial: Dial,
        *,
        replica: str,
        instance: str,
        new_uid: str,
        uid: str = "",
        clock: Callable[[], float],
        unix_now: Callable[[], float],
        rng: random.Random,
        probe: Prober,
        renewals: Store | None = None,
        ask_members: AskMembers = _no_members,
        version: str = "",
        page: PageFactory | None = None,
        resources: ResourceFactory | None = None,
    ) -> None:
        keys = ClusterKeys(config.cluster)
        measures = Measures()
        measured = MeasuredStore(store, measures)
        renewing = measured if renewals is None else MeasuredStore(renewals, measures)
        mirror = Mirror(
            measured,
            keys,
            new_uid=new_uid,
            uid=uid,
            answered=lambda: max(measured.revision, renewing.revision),
            clock=clock,
            measures=measures,
        )
        executor = Executor(measured, mirror, measures)
        self._dry_runs = DryRuns(
            store=measured, mirror=mirror, keys=keys, ask_members=ask_members, clock=clock
        )
        measured.on_write = renewing.on_write = self._dry_runs.wrote
        measured.on_answer = renewing.on_answer = mirror.note_contact
        heartbeat = ControllerWatchdog(clock)
        self._serving = serving
        self._renewals = renewing
        self._stores = (measured,) if renewing is measured else (measured, renewing)
        self._version = version
        self._page = page
        self._http_address = ""
        self._registration: Registration | None = None
        self._stopping = asyncio.Event()
        election = Election(
            renewals=self._renewals,
            mirror=mirror,
            executor=executor,
            keys=keys,
            instance=InstanceId(instance),
            replica=ReplicaId(checked_id("replica", replica)),
            heartbeat=heartbeat,
            clock=clock,
        )
        charts = Charts(mirror.view, keys, unix_now=unix_now)
        self.context = ReplicaContext(
            config=config,
            keys=keys,
            store=measured,
            mirror=mirror,
            executor=executor,
            election=election,
            deposition=Deposition(
                store=self._renewals,
                mirror=mirror,
                keys=keys,
                probe=probe,
                clock=clock,
            ),
            timing=Timing.derive(config.detect_s),
            replica=ReplicaId(replica),
            instance=InstanceId(instance),
            health=Health(mirror, clock, self._dry_runs.outage),
            is_ready=self.is_ready,
            outage=self._dry_runs.outage,
            invariants=InvariantAudit(mirror, keys, measures),
            clock=clock,
            etcd_members=self._dry_runs.members,
            unix_now=unix_now,
            rng=rng,
            charts=charts,
            save_times=SaveTimes(mirror.view, keys, measures, clock=clock, committed=charts.committed),
            measures=measures,
        )
        self.service = Service(self.context, dial)
        self.observed = Observed(
            self.context, measured, self.service.live, self.service.call, version=version
        )
        self._read = None if resources is None else resources(self.observed)
        self._leader_term = LeaderTerm(
            self.context, heartbeat, self.service.failure_detector.has_recent_transport
        )

    def is_ready(self) -> tuple[bool, str]:
        """Return whether members may be sent to this replica, and if not, why."""
        if self._stopping.is_set():
            return False, "it is stopping"
        if not self.context.mirror.uid:
            return False, self.context.mirror.waits_because or "it has not read the keyspace yet"
        if self._registration is None or not self._registration.registered:
            return False, "it is not registered with etcd"
        why = self.context.health.unready()
        return not why, why

    @property
    def revision(self) -> int:
        """The newest revision of etcd that this replica knows."""
        return max(self.context.mirror.view.revision, *(store.revision for store in self._stores))

    def stop(self) -> None:
        """Make `run` return: resign, move the sessions to other replicas, delete this replica's own key."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`, or until an error makes serving impossible.

        Raise that error: `ClusterReplaced`, `Conflict` if another instance has the replica's name, `ConfigError`
        if the port is taken.
        """
        with structlog.contextvars.bound_contextvars(replica=self.context.replica), _bare_errors():
            async with asyncio.TaskGroup() as tasks:
                stopping = tasks.create_task(self._stopping.wait(), name="stopping")
                running = [
                    tasks.create_task(self.context.mirror.run(), name="mirror"),
                    tasks.create_task(self.context.executor.run(), name="executor"),
                    tasks.create_task(self.observed.run(), name="observed"),
                    tasks.create_task(self.context.health.run(), name="health"),
                    tasks.create_task(self._dry_runs.run(), name="dry runs"),
                    tasks.create_task(self.context.invariants.run(), name="invariants"),
                    *(
                        tasks.create_task(_raised(one.replaced), name="etcd's identity")
                        for one in self._stores
                    ),
                    tasks.create_task(self.context.mirror.started(), name="started"),
                ]
                async with self._page_served(tasks):
                    await asyncio.wait((running[-1], stopping), return_when=asyncio.FIRST_COMPLETED)
                    if not stopping.done():
                        await self._serve(tasks, stopping)
                await _cancel(running)

    @contextlib.asynccontextmanager
    async def _page_served(self, tasks: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Serve the status page, if there is one, while the body runs."""
        if self._page is None:
            yield
            return
        page = self._page(self.observed)
        self._http_address = await page.start()
        running = tasks.create_task(page.run(), name="page")
        try:
            yield
        finally:
            await page.stop()
        await _cancel([running])

    async def _serve(self, tasks: asyncio.TaskGroup, stopping: asyncio.Task[Any]) -> None:
        """Serve and, if elected, lead until `stopping` is done; then shut down cleanly."""
        context = self.context
        committer = Committer(keys=context.keys, mirror=context.mirror, executor=context.executor)
        serving = self._serving(context, self.service, self._read)
        address = await serving.start()
        try:
            registration = self._register(address)
            running = [
                tasks.create_task(serving.run(), name="serving"),
                tasks.create_task(registration.run(), name="registration"),
                tasks.create_task(drive(committer, context.mirror), name="committer"),
            ]
            leading = [
                tasks.create_task(context.election.run(address=address), name="election"),
                tasks.create_task(self._leader_term.run(), name="leader-term"),
                tasks.create_task(context.deposition.run(), name="deposition"),
                tasks.create_task(FindingLog(context, self.service.live).run(), name="findings"),
            ]
            log.info(
                "replica_serves",
                address=address,
                instance=context.instance,
                cluster=context.config.cluster,
                uid=context.mirror.uid,
            )
            await stopping
            log.info("replica_stops")
            await _cancel(leading)
            await _best_effort("resign", context.election.resign())
        finally:
            await serving.stop()
        await _cancel(running)
        await _best_effort("withdraw", registration.withdraw())

    def _register(self, address: str) -> Registration:
        context = self.context
        self._registration = Registration(
            store=self.context.store,
            mirror=context.mirror,
            keys=context.keys,
            replica=context.replica,
            record=records.Replica(
                instance=context.instance,
                address=address,
                http_address=self._http_address,
                version=self._version,
            ),
        )
        return self._registration


async def _raised(error: asyncio.Future[ClusterReplaced]) -> None:
    """Raise the future's error once it is set."""
    raise await asyncio.shield(error)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _best_effort(what: str, work: Awaitable[None]) -> None:
    """Do shutdown work; ignore its failure, which only costs other replicas time: they learn the same from etcd
    later.
    """
    try:
        async with asyncio.timeout(PARTING_S):
            await work
    except (TimeoutError, StrataError) as error:
        log.warning("shutdown_step_failed", what=what, error=str(error))


@contextlib.contextmanager
def _bare_errors() -> Iterator[None]:
    """Raise the StrataError that ended a group of tasks, instead of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        found: BaseException | None = group.subgroup(ClusterReplaced) or group.subgroup(StrataError)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is None:
            raise
        raise found from group
