"""A rank's barrier rounds: the number of the next round, and the payloads or error of an outcome.
`RankClient.barrier` in `rank_client` waits for the outcome.

Every rank counts the rounds of each barrier name by itself. A rank begins to count after the world's floor: the
last round of that name that ended before the rank joined. A round counts once its outcome is *delivered* to the
caller. If a call times out, the next call arrives at the same round again, or takes the outcome that was received
meanwhile. So no rank counts more rounds than the others.
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
        """Record rounds that ended without this rank, or before it began to count.

        The count of a name with an open round does not change: that round's outcome must still be delivered.
        """
        for name, floor in floors.items():
            if name not in self._open:
                self._last[name] = max(floor, self._last.get(name, 0))

    def next_round(self, name: str) -> int:
        """Return the round number of the next arrival at `name`."""
        return self._last.get(name, 0) + 1

    def pending(self, name: str) -> asyncio.Future[BarrierOutcome] | None:
        """Return the future outcome of this rank's open round at `name`; None without an open round."""
        return self._open.get(name)

    def arrived(self, name: str, outcome: asyncio.Future[BarrierOutcome]) -> None:
        """Record that this rank arrived at its next round, with the future of the round's outcome."""
        self._open[name] = outcome

    def delivered(self, name: str, outcome: BarrierOutcome | None) -> None:
        """Close the open round, and count it if it has an outcome; None means that the arrival was refused."""
        self._open.pop(name, None)
        if outcome is not None:
            self._last[name] = max(outcome.round, self._last.get(name, 0))


def payloads_of(outcome: BarrierOutcome) -> dict[int, bytes]:
    """Return the payloads by rank if the round was released; else raise the round's error."""
    check_released(outcome)
    return dict(outcome.payloads)
