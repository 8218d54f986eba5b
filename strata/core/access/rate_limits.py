"""Rate limits per identity: token buckets for calls, and counts of open streams.

The limits keep one broken client from taking a replica's capacity away from all others. The defaults are far above
the needs of a job, because a session's arrivals, progress and ticks are not counted. The defaults are below the
thousand calls a second that would occupy a replica. Opening a stream counts as a call too, because a watch begins
with all existing keys.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from strata.core.access.authority import Identity, Role
from strata.errors import QuotaExceeded

K = TypeVar("K")

MAX_IDENTITIES: Final = 10_000
"""The maximum of buckets, for identities and for addresses each; above it the least recent caller's is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """`per_s` calls a second on average, and up to `burst` calls at the same moment."""

    per_s: float
    burst: float


class Buckets(Generic[K]):
    """A token bucket for each key, at one rate. A bucket is stored as the time when it will be full again."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._full_at_s: OrderedDict[K, float] = OrderedDict()

    def take(self, key: K, now_s: float) -> float:
        """Count one call by `key`; return the seconds to wait if its bucket is empty, else 0.0.

        A call that has to wait takes no token: repeated calls do not extend the wait.
        """
        full_at_s = max(self._full_at_s.get(key, now_s), now_s) + 1 / self.rate.per_s
        wait_s = full_at_s - now_s - self.rate.burst / self.rate.per_s
        if wait_s > 1e-9:
            return wait_s
        self._full_at_s[key] = full_at_s
        self._full_at_s.move_to_end(key)
        if len(self._full_at_s) > MAX_IDENTITIES:
            self._full_at_s.popitem(last=False)
        return 0.0


RATE: Final = Rate(per_s=500.0, burst=2_000.0)
STRANGERS: Final = Rate(per_s=2.0, burst=20.0)
"""The rate per address above which unauthenticated calls get `QuotaExceeded`.

A client with a wrong token retries every two seconds.
"""


class Seldom:
    """A rate limit for reports of an event that may occur any number of times."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0
        self._unreported = 0

    def due(self, now_s: float) -> int | None:
        """Return how many reports were suppressed since the last that was made; None: suppress this report too."""
        if now_s < self._next_s:
            self._unreported += 1
            return None
        self._next_s = now_s + self._interval_s
        pending_errors, self._unreported = self._unreported, 0
        return pending_errors


MOST_OPEN: Final[Mapping[str, int]] = {"sessions": 64, "watches": 256}
"""The maximum of open streams of a kind per identity and replica. A reconnecting member briefly has two sessions;
standalone processes of one host may share an identity."""


class Meter:
    """The buckets and counts of a replica. Coordinators are not counted: they forward for others."""

    def __init__(self, rate: Rate = RATE, strangers: Rate = STRANGERS) -> None:
        self._calls: Buckets[tuple[Role, str]] = Buckets(rate)
        self._strangers: Buckets[str] = Buckets(strangers)
        self._open: Counter[tuple[Role, str, str]] = Counter()

    def call(self, identity: Identity | None, now_s: float) -> None:
        """Count one call, or raise `QuotaExceeded` with the time until a retry."""
        if identity is None or identity.role is Role.COORDINATOR:
            return
        wait_s = self._calls.take((identity.role, identity.id), now_s)
        if wait_s:
            raise QuotaExceeded(
                f"{identity} makes more than {self._calls.rate.per_s:g} calls a second",
                hint=f"call again in {max(wait_s, 0.01):.2f} s",
            )

    def stranger(self, address: str, now_s: float) -> None:
        """Count a call from `address` whose caller is unknown; `QuotaExceeded` if there are too many.

        Authenticated callers at the same address are not counted, and this limit never refuses them.
        """
        wait_s = self._strangers.take(address, now_s)
        if wait_s:
            raise QuotaExceeded(
                f"too many calls from {address} by unknown callers",
                hint=f"check the token or the certificate, and call again in {max(wait_s, 0.01):.2f} s",
            )

    def open(self, identity: Identity | None, kind: str) -> None:
        """Count an opening stream: "sessions" or "watches"; `QuotaExceeded` above the limit."""
        if identity is None or identity.role is Role.COORDINATOR:
            return
        key = (identity.role, identity.id, kind)
        if self._open[key] >= MOST_OPEN[kind]:
            raise QuotaExceeded(
                f"{identity} holds {self._open[key]} {kind} open at this replica, the limit",
                hint="close some, or give each process an identity of its own",
            )
        self._open[key] += 1

    def close(self, identity: Identity | None, kind: str) -> None:
        """Count the end of a stream that `open` counted."""
        if identity is None or identity.role is Role.COORDINATOR:
            return
        key = (identity.role, identity.id, kind)
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
