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
"""Before `run` the loop is not measured: the replica serves nobody yet."""


class Health:
    """This replica's health, checked before each act that could harm a member. `clock` also counts time in suspend.

    `outage` returns why no replica can write. An outage does not make this replica unready: no other replica
    would serve its members better.
    """

    def __init__(self, mirror: Mirror, clock: Callable[[], float], outage: Callable[[], str]) -> None:
        self._outage = outage
        self._mirror = mirror
        self._clock = clock
        self._diagnosis = Diagnosis(turned_s=clock() + START_S)
        self._logged_reason = ""

    async def run(self) -> None:
        """Measure the loop until cancelled."""
        self._diagnosis = Diagnosis(turned_s=self._clock())
        while True:
            await asyncio.sleep(TURN_S)
            self._diagnosis.turned(
                self._clock(), etcd_silence_s=self.etcd_silence_s(), behind_s=self._mirror.behind_s()
            )
            self._log_change(self.unready())

    def unready(self) -> str:
        """Return why this replica cannot serve members well now, or an empty string if it can."""
        return self._diagnosis.unready(
            self._clock(), etcd_silence_s=self.etcd_silence_s(), behind_s=self._mirror.behind_s()
        )

    def better_off(self, peer_silence_s: float) -> bool:
        """True if members should move to a ready peer for which etcd has been silent for `peer_silence_s`."""
        return self._diagnosis.better_off(
            self._clock(),
            etcd_silence_s=self.etcd_silence_s(),
            peer_silence_s=peer_silence_s,
            behind_s=self._mirror.behind_s(),
        )

    def is_cut_off(self) -> bool:
        """True if no decision can succeed here: etcd does not answer, or the view is too far behind."""
        return self.etcd_silence_s() > ETCD_SILENT_S or self._mirror.behind_s() > BEHIND_S

    def spares_s(self) -> float:
        """Return for how long this replica must not delete members; 0 if it may delete them."""
        if self._outage():
            # a member deleted now could not register again
            self._diagnosis.spare(self._clock(), "etcd takes no writes")
        return self._diagnosis.spares_s(
            self._clock(), etcd_silence_s=self.etcd_silence_s(), behind_s=self._mirror.behind_s()
        )

    def alone(self) -> None:
        """Record that the last ready peer is no longer ready."""
        self._diagnosis.spare(self._clock(), "it lost every peer that was ready")

    def lost(self, *, left: int) -> None:
        """Record that a session broke, and that `left` sessions remain."""
        now_s = self._clock()
        before_s = self._diagnosis.spare_until_s
        self._diagnosis.lost(now_s, left=left)
        if before_s <= now_s < self._diagnosis.spare_until_s:
            log.warning("member_removal_suspended", reason=self._diagnosis.spare_reason)

    def etcd_silence_s(self) -> float:
        """Return for how long etcd has been silent; 0 before etcd's first answer, when this replica serves nobody."""
        silence_s = self._mirror.silence_s()
        return 0.0 if math.isinf(silence_s) else silence_s

    def _log_change(self, why: str) -> None:
        kind = why.partition(" for ")[0]  # log once a reason, not once a turn
        if kind != self._logged_reason:
            self._logged_reason = kind
            if why:
                log.warning("replica_unready", reason=why)
            else:
                log.info("replica_ready_again")
