"""Forwarding of arrivals from this replica's own members to its peers (PROTOCOLS 6.3).

Level-triggered: new arrivals go out within 5 ms. All arrivals of open rounds go out again whenever the ready peers
change, and every second until the outcome is in the view. A peer ignores duplicates, so this module does not track
which arrivals a peer has received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from strata.core.barriers.outcomes import BarrierBook, BarrierKey
from strata.v1 import barriers_pb2
from strata.wire import barriers as wire

COALESCE_S: Final = 0.005
"""How long an arrival waits, so that one message can forward several arrivals. The last arrival does not wait: once
all of this replica's members have arrived, their arrivals are forwarded immediately. (With 1 ms, half of a replica's
time in a burst went into forwarding.)"""


@dataclass(slots=True)
class _Own:
    """The arrivals at one open round that came from own members, not from a peer."""

    awaited: int
    ranks: set[int] = field(default_factory=set)
    unsent: set[int] = field(default_factory=set)


class Forwarding:
    """Forwards arrivals of own members by `send`, which reaches every ready peer."""

    def __init__(self, book: BarrierBook, send: Callable[[list[barriers_pb2.Arrival]], None]) -> None:
        self.send = send
        self._book = book
        self._own: dict[BarrierKey, _Own] = {}
        self._unsent: set[BarrierKey] = set()
        self._flush: asyncio.TimerHandle | None = None

    def add(self, key: BarrierKey, ranks: Collection[int], served: Callable[[], int]) -> None:
        """Forward the arrivals of `ranks`, which own members run.

        `served` returns the number of participants that have a session at this replica; it is called once a round.
        """
        own = self._own.get(key)
        if own is None:
            own = self._own[key] = _Own(served())
        if own.ranks.issuperset(ranks):
            return
        own.unsent.update(set(ranks) - own.ranks)
        own.ranks.update(ranks)
        self._unsent.add(key)
        if len(own.ranks) >= own.awaited:
            self._send_unsent()
        elif self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(COALESCE_S, self._send_unsent)

    def drop(self, key: BarrierKey) -> None:
        """Stop forwarding a round that has ended."""
        self._own.pop(key, None)
        self._unsent.discard(key)

    def again(self) -> None:
        """Forward the arrivals of all open rounds once more."""
        arrivals = [self._arrival(key, own.ranks) for key, own in self._own.items()]
        if arrivals:
            self.send(arrivals)

    def _send_unsent(self) -> None:
        """Forward the unsent arrivals of all rounds together."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        keys, self._unsent = self._unsent, set()
        arrivals = []
        for key in keys:
            own = self._own[key]
            arrivals.append(self._arrival(key, own.unsent))
            own.unsent = set()
        if arrivals:
            self.send(arrivals)

    def _arrival(self, key: BarrierKey, ranks: Collection[int]) -> barriers_pb2.Arrival:
        open_round = self._book.get(key)
        assert open_round is not None, "a round is dropped here and from the book together"
        now_ms = asyncio.get_running_loop().time() * 1000
        return wire.arrival_message(open_round.arrival(now_ms, ranks))
