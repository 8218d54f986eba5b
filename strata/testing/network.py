"""`Network`: delay, loss and partition between a client and the in-memory store.

Two rules make the faults realistic:
- A request takes effect in one instant at the store, some time after it was sent. Nothing that the client does in
  between (give up, be cancelled, close) takes the request back. So a write whose caller got `Unavailable` may be
  applied later, between two steps of another client.
- A client cannot distinguish a lost response from a lost request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from strata.core.kv.txn import Range, Txn, WatchBatch

Kind = Literal["read", "execute", "grant", "keep_alive", "revoke", "compact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one client; `argument` is the only argument of the called method."""

    client: str
    kind: Kind
    argument: Range | Txn | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The delays and losses of a call in transit.

    The request arrives after `delay_s`, and the response `answer_delay_s` later. A client gives up after its own
    limit, but a request that arrives after that still takes effect. If `lost` is "request", the call does not take
    effect. If `lost` is "answer", the call takes effect, but the response is lost. In both cases the call raises
    `Unavailable` when the lost message would have arrived, as on a broken connection.
    """

    delay_s: float = 0.0
    answer_delay_s: float = 0.0
    lost: Literal["request", "answer"] | None = None


PROMPT = Fate()


class Network(Protocol):
    """Decides the fate of its clients' calls and watches.

    All three methods are called in the loop's thread, and may change the test's state: for example, write to the
    store before a call leaves, or kill a replica after its write was applied.
    """

    def fate(self, call: Call) -> Fate:
        """Return the fate of a call, before it leaves."""
        ...

    def applied(self, call: Call) -> None:
        """Observe that a call has taken effect or was refused by the store; its response is not sent yet."""
        ...

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        """Return the delay of a batch in transit; whatever the delays, batches of a watch stay in order."""
        ...


class PromptNetwork:
    """No delay, no loss. A base class for tests that override one of the methods."""

    def fate(self, call: Call) -> Fate:
        return PROMPT

    def applied(self, call: Call) -> None:
        pass

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        return 0.0
