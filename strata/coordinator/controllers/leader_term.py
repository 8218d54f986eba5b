"""The leader's term: starts the controllers when this replica is elected, and stops them when the term ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from strata.coordinator.context import ReplicaContext
from strata.coordinator.controllers.compaction import Compaction
from strata.coordinator.controllers.coordinators import CoordinatorList
from strata.coordinator.controllers.datasets import Datasets
from strata.coordinator.controllers.housekeeping import Housekeeping
from strata.coordinator.controllers.loop import Controller, drive
from strata.coordinator.controllers.retention import RetentionController
from strata.coordinator.controllers.world import Worlds
from strata.coordinator.leadership.controller_watchdog import ControllerWatchdog
from strata.coordinator.writes.fence import Fence
from strata.core.ids import Epoch
from strata.errors import NotLeader

OVER: Final = "its controllers may not write any more"


class LeaderTerm:
    """Runs new controllers in every term that this replica wins.

    `has_recent_transport`: whether a boot of a job's worker has a transport at this replica, or had one a moment ago.
    """

    def __init__(
        self,
        context: ReplicaContext,
        heartbeat: ControllerWatchdog,
        has_recent_transport: Callable[[str, str, str], bool],
    ) -> None:
        self._context = context
        self._heartbeat = heartbeat
        self._has_recent_transport = has_recent_transport

    async def run(self) -> None:
        """Run a term whenever this replica is elected, until cancelled."""
        while True:
            await self._run_term(await self._context.election.elected())

    async def _run_term(self, epoch: Epoch) -> None:
        """Run the controllers until the term ends; the first controller that loses the fence ends the term for all."""
        election, mirror = self._context.election, self._context.mirror
        try:
            async with asyncio.TaskGroup() as tasks:
                working = [
                    tasks.create_task(drive(controller, mirror, self._context.measures), name=controller.name)
                    for controller in self._controllers(epoch)
                ]
                await election.ended(epoch)
                for task in working:
                    task.cancel()
        except* NotLeader:
            election.deposed(epoch, OVER)

    def _controllers(self, epoch: Epoch) -> list[Controller]:
        context = self._context
        store, keys, mirror = context.store, context.keys, context.mirror
        fence = Fence(
            store=store,
            mirror=mirror,
            keys=keys,
            term=context.election,
            epoch=epoch,
            measures=context.measures,
        )
        housekeeping = Housekeeping(
            keys=keys,
            mirror=mirror,
            fence=fence,
            timing=context.timing,
            spares_s=context.health.spares_s,
            has_recent_transport=self._has_recent_transport,
        )
        return [
            Worlds(
                keys=keys,
                mirror=mirror,
                fence=fence,
                heartbeat=self._heartbeat,
                unix_now=context.unix_now,
                is_clearing=housekeeping.is_clearing,
            ),
            Datasets(keys=keys, mirror=mirror, fence=fence),
            housekeeping,
            CoordinatorList(keys=keys, mirror=mirror, fence=fence, unix_now=context.unix_now),
            RetentionController(keys=keys, mirror=mirror, fence=fence, unix_now=context.unix_now),
            Compaction(
                store=store,
                mirror=mirror,
                quota_bytes=context.config.etcd.quota_bytes,
                members=context.etcd_members,
            ),
        ]
