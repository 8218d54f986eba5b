"""`MemoryEtcd`: etcd's semantics in memory, without client connections (for those see `memory_store`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from strata.core.kv.txn import Lease, Range, RangeResult, Txn, TxnResult
from strata.errors import InvalidArgument, NotFound
from strata.testing import txn_limits
from strata.testing.mvcc import Revision, State
from strata.testing.processes import BETWEEN

MAX_LEASE_TTL_S: Final = 9_000_000_000
_FIRST_LEASE: Final = 0x1000


class MemoryEtcd:
    """etcd's semantics over `State`, with leases that expire by the running loop's clock.

    A TTL below `min_ttl_s` is raised to `min_ttl_s`, which is 2 s at etcd's default election timeout. A lease expires
    exactly at the end of its TTL; real etcd may take up to a second longer.
    """

    def __init__(self, *, min_ttl_s: int = 2) -> None:
        self.state = State()
        self._min_ttl_s = min_ttl_s
        self._next_lease = _FIRST_LEASE
        self._ttl_s: dict[int, int] = {}
        self._deadline: dict[int, float] = {}
        self._leases_held = False
        self._subscribers: list[Callable[[Revision], None]] = []

    def subscribe(self, subscriber: Callable[[Revision], None]) -> Callable[[], None]:
        """Call `subscriber` with every write, immediately; return a function that ends the subscription."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def _publish(self, written: Revision | None) -> None:
        if written is not None:
            for subscriber in tuple(self._subscribers):
                subscriber(written)

    # -- faults ----------------------------------------------------------------------------------

    def hold_leases(self) -> None:
        """Let no lease expire, as in etcd without a leader."""
        self._leases_held = True

    def release_leases(self) -> None:
        """End `hold_leases`: every lease gets its full TTL again, as from a new etcd leader."""
        self._leases_held = False
        for lease_id in self._ttl_s:
            self._renew(lease_id)

    def drop_keys_of(self, lease_id: int) -> int:
        """Delete the keys of a lease but keep answering its keepalives; return the number of keys.

        etcd has had such bugs (etcd#14758, #15247).
        """
        dropped = len(self.state.leased.get(lease_id, ()))
        if dropped:
            self._publish(self.state.drop_lease(lease_id))
            self.state.leased[lease_id] = set()
        return dropped

    # -- the calls, each in one instant ----------------------------------------------------------

    def read(self, request: Range) -> RangeResult:
        """Do the same as `Store.read`."""
        return self.state.read(request)

    def execute(self, txn: Txn) -> TxnResult:
        """Do the same as `Store.execute`."""
        txn_limits.check(txn)
        result, written = self.state.apply(txn)
        self._publish(written)
        return result

    def compact(self, revision: int) -> None:
        """Do the same as `Store.compact`."""
        self.state.compact(revision)

    def grant(self, ttl_s: int) -> Lease:
        """Do the same as `Store.grant`."""
        if ttl_s > MAX_LEASE_TTL_S:
            raise InvalidArgument("too large lease TTL")
        lease = Lease(id=self._next_lease, ttl_s=max(ttl_s, self._min_ttl_s))
        self._next_lease += 1
        self._ttl_s[lease.id] = lease.ttl_s
        self.state.leased[lease.id] = set()
        self._renew(lease.id)
        loop = asyncio.get_running_loop()
        loop.call_at(self._deadline[lease.id], self._expire, lease.id, context=BETWEEN)
        return lease

    def keep_alive(self, lease_id: int) -> int:
        """Do the same as `Store.keep_alive`."""
        if lease_id not in self._ttl_s:
            raise NotFound(f"there is no lease {lease_id:x} (any more)")
        self._renew(lease_id)
        return self._ttl_s[lease_id]

    def revoke(self, lease_id: int) -> None:
        """Do the same as `Store.revoke`."""
        if self._ttl_s.pop(lease_id, None) is not None:
            del self._deadline[lease_id]
            self._publish(self.state.drop_lease(lease_id))

    def _renew(self, lease_id: int) -> None:
        self._deadline[lease_id] = asyncio.get_running_loop().time() + self._ttl_s[lease_id]

    def _expire(self, lease_id: int) -> None:
        deadline = self._deadline.get(lease_id)
        if deadline is None:
            return  # the lease was revoked
        loop = asyncio.get_running_loop()
        if self._leases_held:
            loop.call_later(1.0, self._expire, lease_id, context=BETWEEN)
        elif loop.time() < deadline:
            loop.call_at(deadline, self._expire, lease_id, context=BETWEEN)
        else:
            self.revoke(lease_id)
