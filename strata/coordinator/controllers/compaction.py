"""Compaction: drops etcd's history older than five minutes, and warns when etcd fills up (PROTOCOLS 3.5).

etcd knows revisions, not times, so the controller samples the view's revision. A compaction cannot be fenced
and need not be: a former leader that drops history older than five minutes does no harm, however late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from strata.coordinator.etcd.members import EtcdMember
from strata.coordinator.view.mirror import Mirror
from strata.core.kv.store import Store
from strata.core.kv.txn import WatchBatch
from strata.observe import get_logger

log = get_logger()

KEEP_S: Final = 300.0
SAMPLE_S: Final = 15.0
QUOTA_EVERY_S: Final = 60.0
WARN_SHARE: Final = 0.7


class Compaction:
    """The controller that compacts; `members` returns the etcd members with their database sizes."""

    name: Final = "compaction"
    tick_s: Final = SAMPLE_S

    def __init__(
        self, *, store: Store, mirror: Mirror, quota_bytes: int, members: Callable[[], Sequence[EtcdMember]]
    ) -> None:
        self._store = store
        self._mirror = mirror
        self._quota_bytes = quota_bytes
        self._members = members
        self._samples: deque[tuple[float, int]] = deque()
        self._compacted = 0
        self._quota_at = 0.0

    def wants(self, batch: WatchBatch) -> bool:  # due by time only, never by a change
        return False

    async def turn(self) -> None:
        now = asyncio.get_running_loop().time()
        self._samples.append((now, self._mirror.view.revision))
        target = 0
        while self._samples and self._samples[0][0] <= now - KEEP_S:
            target = self._samples.popleft()[1]
        if target > self._compacted:
            await self._store.compact(target)
            self._compacted = target
            log.debug("compacted", revision=target)
        if now >= self._quota_at:
            self._quota_at = now + QUOTA_EVERY_S
            self._check_quota()

    def _check_quota(self) -> None:
        used_bytes = max((m.db_size_bytes for m in self._members()), default=0)
        share = used_bytes / self._quota_bytes
        if share >= WARN_SHARE:
            log.warning(
                "etcd_fills_up",
                used_bytes=used_bytes,
                quota_bytes=self._quota_bytes,
                percent=round(100 * share),
                hint="defragment etcd, or raise its quota and etcd.quota_bytes",
            )
