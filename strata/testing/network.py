"""What lies between a client and the in-memory store: delay, loss, partition.

The rules that make faults honest:

- A request takes effect in one instant, at the store, some time after it was sent. Nothing the
  client does in between (giving up, being cancelled, closing) takes it back. So a write whose
  caller heard `Unavailable` may be applied later, between two steps of somebody else.
- An answer that is lost looks to the client like a request that was lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from strata.core.kv.txn import Range, Txn, WatchBatch

Kind = Literal["read", "execute", "grant", "keep_alive", "revoke", "compact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one client; `argument` is the method's only one."""

    client: str
    kind: Kind
    argument: Range | Txn | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to a call on its way.

    The request arrives after `delay_s`, the answer `answer_delay_s` after that; a client gives up
    after its own limit, and a request that arrives later still takes effect. `lost` "request":
    nothing happens at the store. "answer": it happens, and nobody hears. Both show as
    `Unavailable` at the moment when the message would have arrived, like a connection that breaks.
    """

    delay_s: float = 0.0
    answer_delay_s: float = 0.0
    lost: Literal["request", "answer"] | None = None


PROMPT = Fate()


class Network(Protocol):
    """Decides the fate of calls and watches of the clients that it is given to.

    All three are called in the loop's thread and may act on the test's world: write to the store
    before a call leaves, kill a replica after its write was applied.
    """

    def fate(self, call: Call) -> Fate:
        """Decide about a call, before it leaves."""
        ...

    def applied(self, call: Call) -> None:
        """Hear that a call took effect, or was refused by the store; its answer is not out yet."""
        ...

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        """Return how long a batch is on its way; a watch keeps its order all the same."""
        ...


class PromptNetwork:
    """No delay, no loss. A base for tests that override one of the three."""

    def fate(self, call: Call) -> Fate:
        return PROMPT

    def applied(self, call: Call) -> None:
        pass

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        return 0.0
