"""How often an identity may ask, and how much it may hold open: token buckets and counts.

The defaults are far above what a job needs: a session carries arrivals, progress and ticks, which
are not counted here at all, and a thousand calls a second is what a replica has better uses for.
A stream that opens is a call too: a watch begins with all that is there.
They keep one broken client from taking a replica away from everybody else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from strata.core.authority import Identity, Role
from strata.errors import QuotaExceeded

K = TypeVar("K")

MAX_IDENTITIES: Final = 10_000
"""Of how many identities, and addresses, the bucket is remembered; the one that asked longest ago is
forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """`per_s` calls a second on the average, `burst` at once."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What is left at the moment `at_s` of some clock that only goes forward."""

    left: float
    at_s: float


def take(bucket: Bucket | None, rate: Rate, now_s: float) -> tuple[Bucket, float]:
    """Return the bucket after one call, and the seconds to wait when it is empty (else 0.0).

    A call that has to wait takes nothing: who keeps asking is not punished for asking.
    """
    if bucket is None:
        left = rate.burst
    else:
        elapsed_s = max(0.0, now_s - bucket.at_s)
        left = min(rate.burst, bucket.left + elapsed_s * rate.per_s)
    if left >= 1.0:
        return Bucket(left=left - 1.0, at_s=now_s), 0.0
    return Bucket(left=left, at_s=now_s), (1.0 - left) / rate.per_s


RATE: Final = Rate(per_s=500.0, burst=2_000.0)
STRANGERS: Final = Rate(per_s=2.0, burst=20.0)
"""How often one address may be told that nobody knows who it is; a client that was given a wrong token
comes back every two seconds."""


class Seldom:
    """Says when something that may come in any number is to be said again."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0
        self._untold = 0

    def due(self, now_s: float) -> int | None:
        """Return how many were not told since the last time, or None: this one is not told either."""
        if now_s < self._next_s:
            self._untold += 1
            return None
        self._next_s = now_s + self._interval_s
        untold, self._untold = self._untold, 0
        return untold


def _taken(buckets: OrderedDict[K, Bucket], key: K, rate: Rate, now_s: float) -> float:
    """Count one call by `key`; return the seconds to wait, 0.0 for none."""
    buckets[key], wait_s = take(buckets.get(key), rate, now_s)
    buckets.move_to_end(key)
    if len(buckets) > MAX_IDENTITIES:
        buckets.popitem(last=False)
    return wait_s


MOST_OPEN: Final[Mapping[str, int]] = {"sessions": 64, "watches": 256}
"""How many streams of a kind one identity may hold open at a replica. A reconnecting member has two sessions for a
moment; lone trainers of one host may share an identity."""


class Meter:
    """The buckets and counts of a replica. Coordinators are not counted: they relay for others."""

    def __init__(self, rate: Rate = RATE, strangers: Rate = STRANGERS) -> None:
        self._rate = rate
        self._strangers = strangers
        self._addresses: OrderedDict[str, Bucket] = OrderedDict()
        self._buckets: OrderedDict[tuple[Role, str], Bucket] = OrderedDict()
        self._open: Counter[tuple[Role, str, str]] = Counter()

    def call(self, identity: Identity | None, now_s: float) -> None:
        """Count one call; `QuotaExceeded` says when to come again."""
        if identity is None or identity.role is Role.COORDINATOR:
            return
        wait_s = _taken(self._buckets, (identity.role, identity.id), self._rate, now_s)
        if wait_s:
            raise QuotaExceeded(
                f"{identity} makes more than {self._rate.per_s:g} calls a second",
                hint=f"ask again in {max(wait_s, 0.01):.2f} s",
            )

    def stranger(self, address: str, now_s: float) -> None:
        """Count a call from `address` whose caller is unknown; `QuotaExceeded` when there are too many.

        Whoever is known at the same address is not counted, and never refused for it.
        """
        wait_s = _taken(self._addresses, address, self._strangers, now_s)
        if wait_s:
            raise QuotaExceeded(
                f"too many calls from {address} by nobody that this cluster knows",
                hint=f"check the token or the certificate, and ask again in {max(wait_s, 0.01):.2f} s",
            )

    def open(self, identity: Identity | None, kind: str) -> None:
        """Count a stream that opens: "sessions" or "watches"; `QuotaExceeded` when it is one too many."""
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
        """Count a stream that ended, of those that `open` counted."""
        if identity is None or identity.role is Role.COORDINATOR:
            return
        key = (identity.role, identity.id, kind)
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
