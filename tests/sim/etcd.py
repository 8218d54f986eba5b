"""The connection from a replica to etcd. Messages arrive immediately, unless faults lose or delay them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from strata.core.kv.txn import Txn, WatchBatch
from strata.testing.network import Call, Fate


class Line:
    """The `Network` of one replica. A field above 0 is the probability of that failure."""

    def __init__(
        self, rng: random.Random, applied: Callable[[Call], None], sent: Callable[[Call], None]
    ) -> None:
        self.lose_request = 0.0
        self.lose_answer = 0.0
        self.late = 0.0
        """Probability that a call takes up to 12 s to arrive, longer than its caller waits."""
        self.stale_s = 0.0
        """Largest delay of the watch, in seconds."""
        self.leaderless = False
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._applied = applied
        self._sent = sent

    @property
    def is_flaky(self) -> bool:
        """Whether some messages are lost or late."""
        return bool(self.lose_request or self.lose_answer or self.late)

    def fate(self, call: Call) -> Fate:
        self._sent(call)
        if self.leaderless:
            self.counts["leaderless"] += 1
            return Fate(lost="request", delay_s=0.3)
        delay_s = 0.0005 + 0.001 * self._rng.random()
        if self.is_flaky:
            chance, kind = self._rng.random(), "write" if isinstance(call.argument, Txn) else "call"
            if chance < self.lose_request:
                self.counts[f"{kind} lost"] += 1
                return Fate(lost="request", delay_s=self._rng.uniform(0, 0.5))
            if chance < self.lose_request + self.lose_answer:
                self.counts[f"{kind} unanswered"] += 1
                return Fate(lost="answer", delay_s=delay_s, answer_delay_s=self._rng.uniform(0, 0.5))
            if chance < self.lose_request + self.lose_answer + self.late:
                self.counts[f"{kind} late"] += 1
                return Fate(delay_s=self._rng.choice((self._rng.uniform(0.5, 2), self._rng.uniform(2, 12))))
        return Fate(delay_s=delay_s, answer_delay_s=0.0005)

    def applied(self, call: Call) -> None:
        self._applied(call)

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        if self.stale_s:
            self.counts["stale batch"] += 1
            return self.stale_s * self._rng.random()
        return 0.0005

    def heal(self) -> None:
        """End all losses and delays."""
        self.lose_request = self.lose_answer = self.late = self.stale_s = 0.0
        self.leaderless = False
