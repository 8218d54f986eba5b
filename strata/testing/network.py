"""`Network`: delay, loss and partition between a client and the in-memory store.

Two rules make the faults realistic:
- A request takes effect in one instant at the store, some time after it was sent. Nothing the client does in between
  (giving up, being cancelled, closing) takes it back. So a write whose caller got `Unavailable` may be applied later,
  between two steps of another client.
- A client cannot distinguish a lost response from a lost request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from strata.core.kv.txn import Range, Txn, WatchBatch

Kind = Literal["read", "execute", "grant", "keep_alive", "revoke", "compact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one client; `argument` is the method's only argument."""

    client: str
    kind: Kind
    argument: Range | Txn | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The delays and losses of a call in transit.

    The request arrives after `delay_s`, the response `answer_delay_s` after that. A client gives up after its own
    limit, and a request that arrives later still takes effect. `lost` "request": the call does not take effect.
    "answer": it takes effect, but the response is lost. Both raise `Unavailable` at the moment when the message would
    have arrived, like a connection that breaks.
    """

    delay_s: float = 0.0
    answer_delay_s: float = 0.0
    lost: Literal["request", "answer"] | None = None


PROMPT = Fate()


class Network(Protocol):
    """Decides the fate of its clients' calls and watches.

    All three methods are called in the loop's thread, and may act on the test: write to the store before a call leaves,
    or kill a replica after its write was applied.
    """

    def fate(self, call: Call) -> Fate:
        """Return the fate of a call, before it leaves."""
        ...

    def applied(self, call: Call) -> None:
        """Called when a call has taken effect, or was refused by the store, before its response is sent."""
        ...

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        """Return the delay of a batch in transit; the watch keeps its order in any case."""
        ...


class PromptNetwork:
    """No delay, no loss. A base class for tests that override one of the methods."""

    def fate(self, call: Call) -> Fate:
        return PROMPT

    def applied(self, call: Call) -> None:
        pass

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        return 0.0
