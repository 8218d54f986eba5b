"""Stop requests of an agent (signals), and how it ends its ranks when a stop notice requires that.

Ranks that support graceful stop agree on a step, save it and exit with code 75. The agent waits for these exits as
long as the notice allows. Other ranks do not know of the notice: they get SIGTERM, as at any stop. In both cases the
agent ends the ranks that still run afterwards. These ranks count as stopped and not as failed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from strata.agent.exit_reports import ExitReports
from strata.agent.notices import LATE_S, LEAVE_S, SAY_S
from strata.core.exit_codes import PREEMPTED
from strata.launch.ranks import RankGroup
from strata.launch.slots import Slots
from strata.observe import get_logger
from strata.v1.worlds_pb2 import StopNotice

log = get_logger()

PREEMPT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """The signals received so far. The first gives the reason of the stop; a second makes the stop urgent."""

    def __init__(self) -> None:
        self.number = 0
        self._received: set[int] = set()
        self.requested = asyncio.Event()
        self.urgent = asyncio.Event()

    def on_signal(self, number: int) -> None:
        """Record a signal. SIGTERM after SIGUSR1 is not a second one: a scheduler warns with SIGUSR1 first."""
        if self._received and (number in self._received or self._received != {signal.SIGUSR1}):
            self.urgent.set()
        self._received.add(number)
        self.number = self.number or number
        self.requested.set()

    @property
    def next_signal(self) -> asyncio.Event:
        """The event that the next signal sets, be it the first or a second; this event shortens a leaving
        member's deadline.
        """
        return self.urgent if self.requested.is_set() else self.requested

    @property
    def preempts(self) -> bool:
        """Whether the first signal makes all ranks of the job stop together."""
        return self.number in PREEMPT_SIGNALS

    @property
    def signal_name(self) -> str:
        """The name of the first signal."""
        return signal.Signals(self.number).name


class Stopping:
    """Ends this node's ranks as a stop notice requires. `urgent` ends them without any grace."""

    def __init__(
        self,
        slots: Slots,
        reports: ExitReports,
        *,
        stop_grace_s: float,
        restart_grace_s: float,
        urgent: asyncio.Event,
    ) -> None:
        self._slots = slots
        self._reports = reports
        self._stop_grace_s = stop_grace_s
        self._restart_grace_s = restart_grace_s
        self._urgent = urgent

    async def obey(self, notice: StopNotice, *, shorten_deadline: Callable[[], Awaitable[None]]) -> bool:
        """Return True once no rank runs here any more; False if no rank ran here at the call.

        `shorten_deadline` returns when the generation is over: ranks then leave soon by themselves, or never.
        """
        ranks = self._slots.ranks
        if ranks is None:
            return False
        grace_s = self._restart_grace_s
        if notice.grace_ms > 0 and await ranks.wait_graceful_stop_support(min(SAY_S, notice.grace_ms / 1000)):
            limit_s = notice.grace_ms / 1000 + LATE_S
            log.info("run.stopping_together", reason=notice.reason, grace_s=notice.grace_ms / 1000)
            loop = asyncio.get_running_loop()
            until_s = loop.time() + limit_s
            await _ended(ranks, limit_s, shorten_deadline)
            await _ended(ranks, min(LEAVE_S, max(0.0, until_s - loop.time())), self._until_urgent)
            if ranks.running:
                log.warning("run.not_stopped_together", ranks=ranks.alive(), reason=notice.reason)
        elif notice.grace_ms > 0:
            grace_s = min(self._stop_grace_s, notice.grace_ms / 1000 + LATE_S)
            log.info("run.stopping", reason=notice.reason)
        await self._slots.end(grace_s, urgent=self._urgent)
        for rank in sorted(ranks.put_down):
            reason = f"ended without a common step: {notice.reason}"
            self._reports.report(ranks.place.generation, rank, PREEMPTED, reason)
        return True

    async def _until_urgent(self) -> None:
        await self._urgent.wait()


async def _ended(ranks: RankGroup, limit_s: float, shorten_deadline: Callable[[], Awaitable[None]]) -> None:
    """Return once all ranks have ended by themselves, after the limit, or once `shorten_deadline` returns."""
    joined = asyncio.ensure_future(ranks.join())
    shortened = asyncio.ensure_future(shorten_deadline())
    try:
        await asyncio.wait({joined, shortened}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        joined.cancel()
        shortened.cancel()
