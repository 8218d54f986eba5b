"""A replica's own health: measures its event loop and etcd's silence for `core.leadership.replica_health`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from strata.coordinator.view.mirror import Mirror
from strata.core.leadership.replica_health import BEHIND_S, ETCD_SILENT_S, TURN_S, Diagnosis
from strata.observe import get_logger

log = get_logger()

START_S: Final = 60.0
"""Before `run` the loop is not measured; nobody is served then."""


class Health:
    """Asked before each act that could harm a member. `clock` runs through suspends.

    `outage` says why nothing can be written. That makes no replica unready for members: they are
    served nowhere better.
    """

    def __init__(self, mirror: Mirror, clock: Callable[[], float], outage: Callable[[], str]) -> None:
        self._outage = outage
        self._mirror = mirror
        self._clock = clock
        self._diagnosis = Diagnosis(turned_s=clock() + START_S)
        self._told = ""

    async def run(self) -> None:
        """Measure the loop until cancelled."""
        self._diagnosis = Diagnosis(turned_s=self._clock())
        while True:
            await asyncio.sleep(TURN_S)
            self._diagnosis.turned(
                self._clock(), etcd_silence_s=self.etcd_silence_s(), behind_s=self._mirror.behind_s()
            )
            self._tell(self.unready())

    def unready(self) -> str:
        """Return why this replica is no good for members now; an empty string when it is."""
        return self._diagnosis.unready(
            self._clock(), etcd_silence_s=self.etcd_silence_s(), behind_s=self._mirror.behind_s()
        )

    def better_off(self, peer_silence_s: float) -> bool:
        """Tell whether members should leave for a peer that is ready and heard of etcd so long ago."""
        return self._diagnosis.better_off(
            self._clock(),
            etcd_silence_s=self.etcd_silence_s(),
            peer_silence_s=peer_silence_s,
            behind_s=self._mirror.behind_s(),
        )

    def is_cut_off(self) -> bool:
        """Tell whether nothing can be settled here: etcd does not answer, or what it did comes too late."""
        return self.etcd_silence_s() > ETCD_SILENT_S or self._mirror.behind_s() > BEHIND_S

    def spares_s(self) -> float:
        """Return for how long this replica deletes nobody; 0 when it may."""
        if self._outage():
            self._diagnosis.spare(
                self._clock(), "etcd takes no writes"
            )  # who is deleted now could not register again
        return self._diagnosis.spares_s(
            self._clock(), etcd_silence_s=self.etcd_silence_s(), behind_s=self._mirror.behind_s()
        )

    def alone(self) -> None:
        """Take note that no peer is ready any more."""
        self._diagnosis.spare(self._clock(), "it lost every peer that was ready")

    def lost(self, *, left: int) -> None:
        """Take note that a session broke, and how many are left."""
        now_s = self._clock()
        before_s = self._diagnosis.spare_until_s
        self._diagnosis.lost(now_s, left=left)
        if before_s <= now_s < self._diagnosis.spare_until_s:
            log.warning("deletes_nobody_for_now", reason=self._diagnosis.spare_reason)

    def etcd_silence_s(self) -> float:
        """Return for how long etcd has been silent since its first answer: none is served before."""
        silence_s = self._mirror.silence_s()
        return 0.0 if math.isinf(silence_s) else silence_s

    def _tell(self, why: str) -> None:
        kind = why.partition(" for ")[0]  # once a trouble, not once a turn
        if kind != self._told:
            self._told = kind
            if why:
                log.warning("replica_unready", reason=why)
            else:
                log.info("replica_well_again")
