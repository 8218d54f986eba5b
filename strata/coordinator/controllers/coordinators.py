"""The list of coordinators, maintained so that a lost replica stays visible (PROTOCOLS 4.9).

The controller writes only when a coordinator registers or its registration ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.fence import Fence
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.txn import WatchBatch
from strata.core.leadership.coordinators import plan_list

EVERY_S: Final = 30.0
AGAIN_S: Final = 0.1


class CoordinatorList:
    """The controller of `P/coordinators/`, for one leader term."""

    name: Final = "coordinators"
    tick_s: Final = EVERY_S

    def __init__(
        self, *, keys: ClusterKeys, mirror: Mirror, fence: Fence, unix_now: Callable[[], float]
    ) -> None:
        self._keys = keys
        self._mirror = mirror
        self._fence = fence
        self._unix_now = unix_now

    def wants(self, batch: WatchBatch) -> bool:
        folders = (self._keys.replicas, self._keys.coordinators)
        return any(event.kv.key.startswith(folders) for event in batch.events)

    async def turn(self) -> float | None:
        """Write the list from the registrations; return a short delay if a registration changed during the write."""
        plan = plan_list(
            self._mirror.view, self._keys, epoch=self._fence.epoch, now_unix_ms=int(1000 * self._unix_now())
        )
        results = [await self._fence.execute(txn) for txn in plan.txns]
        return None if all(result.succeeded for result in results) else AGAIN_S
