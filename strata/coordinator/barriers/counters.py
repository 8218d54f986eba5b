"""The visible counter of a barrier that stays open, as a hint for people (PROTOCOLS 6.5).

One replica maintains the counter of each round: the replica that is first in the order of the outcome's
writers. It writes the counter only if its content changed, at the earliest 0.1 s after the round opened, and at
most every 0.5 s. No decision reads the counter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from strata.coordinator.context import ReplicaContext
from strata.core.barriers.outcomes import BarrierBook, BarrierKey, OpenRound, decide_arrived, writer_delay_ms
from strata.core.ids import InstanceId
from strata.core.job import JobView
from strata.core.kv.txn import Decision
from strata.core.kv.view import View
from strata.errors import StrataError
from strata.observe import get_logger

log = get_logger()


class Counters:
    """Writes the counters of the open rounds in `book`."""

    def __init__(
        self, context: ReplicaContext, book: BarrierBook, ready: Callable[[], Iterable[InstanceId]]
    ) -> None:
        self._context = context
        self._book = book
        self._ready = ready
        self._written_at: dict[BarrierKey, float] = {}

    async def run(self) -> None:
        """Update the counters until cancelled."""
        while True:
            await asyncio.sleep(self._context.timing.counter_after_s)
            open_rounds = list(self._book.open())
            self._written_at = {
                r.key: self._written_at[r.key] for r in open_rounds if r.key in self._written_at
            }
            for open_round in open_rounds:
                if not self._is_due(open_round):
                    continue
                try:
                    await self._write_counter(open_round)
                except StrataError as error:
                    log.debug("counter_not_written", barrier=str(open_round.key), error=error.message)

    def _is_due(self, open_round: OpenRound) -> bool:
        timing, now = self._context.timing, asyncio.get_running_loop().time()
        written_at = self._written_at.get(open_round.key, float("-inf"))
        return (
            now - open_round.since_ms / 1000 >= timing.counter_after_s
            and now - written_at >= timing.counter_every_s
            and writer_delay_ms(open_round.key, self._context.instance, self._ready()) == 0
        )

    async def _write_counter(self, open_round: OpenRound) -> None:
        decide = partial(self._decide, open_round.key)
        if decide(self._context.mirror.view).txn is None:
            return  # nothing to write; settling would read etcd only to find that out
        self._written_at[open_round.key] = asyncio.get_running_loop().time()
        limit_s = self._context.timing.counter_every_s
        await self._context.executor.settle(decide, deadline_s=limit_s, coalesce=True)

    def _decide(self, key: BarrierKey, view: View) -> Decision:
        open_round = self._book.get(key)
        if open_round is None:
            return Decision(reason=f"{key} has ended")
        return decide_arrived(JobView(view, self._context.keys.job(key.job)), open_round)
