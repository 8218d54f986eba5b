"""One coordinator replica, put together.

    mirror, executor                  follow the keyspace, settle decisions on it
    serving, registration             serve, and say where
    committer                         commit what is complete
    election, government              lead, if it falls to this replica

A TaskGroup owns all of it. Nothing here knows grpc: the transport of the serving half comes as a factory, so
that the simulation runs the same replica on faked links.
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
from strata.coordinator.leadership.controller_watchdog import Heartbeat
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
"""Puts a service behind a transport; the last returns a resource of the HTTP API."""
ResourceFactory = Callable[[Observed], ReadResource]
PageFactory = Callable[[Observed], Serving]
"""Makes what serves the status page, the metrics and the probes over HTTP."""

PARTING_S: Final = 3.0
"""How long a stopping replica tries to tell etcd that it goes."""


async def _no_members() -> Sequence[EtcdMember]:
    return ()


class Replica:
    """A replica from its first list to its last goodbye; `run` is its life.

    `store` serves everything, `renewals` only the leader's lease and campaigns: channels of their
    own, on which nothing else is waited for.
    `probe` is the plain connect by which a dead leader is told.
    `instance` and `new_uid` are fresh random names; `uid` is the only cluster that it may serve, if that is known. `clock` runs through suspends.
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
        heartbeat = Heartbeat(clock)
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
        self._leader_term = LeaderTerm(self.context, heartbeat, self.service.failure_detector.hears)

    def is_ready(self) -> tuple[bool, str]:
        """Say whether members may be sent here, and if not, why."""
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
        """The newest revision of etcd that this replica knows of."""
        return max(self.context.mirror.view.revision, *(store.revision for store in self._stores))

    def stop(self) -> None:
        """Make `run` return: resign, let the sessions go elsewhere, take the own key away."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`, or until something makes going on impossible.

        Raises what that was: `ClusterReplaced`, `Conflict` for a replica's name that another
        instance holds, `ConfigError` for a port that is taken.
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
                async with self._shown(tasks):
                    await asyncio.wait((running[-1], stopping), return_when=asyncio.FIRST_COMPLETED)
                    if not stopping.done():
                        await self._serve(tasks, stopping)
                await _cancel(running)

    @contextlib.asynccontextmanager
    async def _shown(self, tasks: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Serve the page while the body runs, if there is one to be served."""
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
        """Serve and, if elected, lead until `stopping` is done; then part in good order."""
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
            office = [
                tasks.create_task(context.election.run(address=address), name="election"),
                tasks.create_task(self._leader_term.run(), name="government"),
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
            await _cancel(office)
            await _politely("resign", context.election.resign())
        finally:
            await serving.stop()
        await _cancel(running)
        await _politely("withdraw", registration.withdraw())

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
    """Raise the error once there is one."""
    raise await asyncio.shield(error)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _politely(what: str, work: Awaitable[None]) -> None:
    """Do what helps the others at parting; etcd finds the rest out by itself."""
    try:
        async with asyncio.timeout(PARTING_S):
            await work
    except (TimeoutError, StrataError) as error:
        log.warning("parting_failed", what=what, error=str(error))


@contextlib.contextmanager
def _bare_errors() -> Iterator[None]:
    """Raise the error of Strata that ended a group of tasks, instead of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        found: BaseException | None = group.subgroup(ClusterReplaced) or group.subgroup(StrataError)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is None:
            raise
        raise found from group
