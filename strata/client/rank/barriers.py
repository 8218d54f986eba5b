"""Which round of a barrier a rank is at, and what an outcome means to whoever called.

Every rank counts the rounds of each name by itself, from the first after the world's floor on. A
round counts once its outcome is *delivered*: a call that gave up locally is followed by one that
arrives at the same round again, or takes the outcome that came in between. So no rank gets ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from strata.v1.barriers_pb2 import BarrierOutcome
from strata.wire.barriers import check_released


class RoundBook:
    """The rounds of one rank in one generation."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._open: dict[str, asyncio.Future[BarrierOutcome]] = {}

    def floors(self, floors: Mapping[str, int]) -> None:
        """Take note of rounds that ended without this rank, or before it began to count.

        A name whose round is open here is not touched: its outcome is still to be delivered.
        """
        for name, floor in floors.items():
            if name not in self._open:
                self._last[name] = max(floor, self._last.get(name, 0))

    def next_round(self, name: str) -> int:
        """Return the round that an arrival at `name` is for."""
        return self._last.get(name, 0) + 1

    def pending(self, name: str) -> asyncio.Future[BarrierOutcome] | None:
        """Return the outcome to come of an arrival that was made and not delivered yet."""
        return self._open.get(name)

    def arrived(self, name: str, outcome: asyncio.Future[BarrierOutcome]) -> None:
        """Keep the outcome to come of an arrival at the next round."""
        self._open[name] = outcome

    def delivered(self, name: str, outcome: BarrierOutcome | None) -> None:
        """Count the round; without an outcome (the arrival was refused) it does not count."""
        self._open.pop(name, None)
        if outcome is not None:
            self._last[name] = max(outcome.round, self._last.get(name, 0))


def payloads_of(outcome: BarrierOutcome) -> dict[int, bytes]:
    """Return what the ranks brought, by rank; raise how the round ended unless it was released."""
    check_released(outcome)
    return dict(outcome.payloads)
