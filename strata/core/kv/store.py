"""The `Store` protocol: the operations of etcd that Strata needs, and nothing more.

One contract suite (`tests/contract`) tests two implementations: the etcd client in `strata.etcd` and the in-memory
store in `strata.testing`.

Both raise the same errors:

- `Unavailable`: the outcome is unknown, and the call may have taken effect (PROTOCOLS 2.3). For a read: no answer
  in time.
- `InvalidArgument`: the store refuses the request as malformed (a key written twice, too many
  operations, an empty key); nothing was written.
- `QuotaExceeded`: the request is too large; nothing was written. A full store is `NoSpace`, an
  `Unavailable`: its answer does not prove that nothing was written (docs/adr/0002).
- `NotFound`: the lease does not exist (any more); nothing was written.
- `Compacted`: the requested revision is compacted; list again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from strata.core.kv.txn import Lease, Range, RangeResult, Txn, TxnResult, WatchBatch
from strata.errors import StrataError, Unavailable


class Compacted(StrataError):
    """The requested revision was compacted away."""

    code = "COMPACTED"


class NoSpace(Unavailable):
    """The store's quota is used up: it takes no write until an operator frees space."""

    code = "NO_SPACE"


class Store(Protocol):
    """A linearizable, revisioned key-value store with leases and watches."""

    async def read(self, request: Range) -> RangeResult:
        """Return the keys of the range; linearizable unless `request.serializable`."""
        ...

    async def execute(self, txn: Txn) -> TxnResult:
        """Apply one transaction.

        The store never retries a transaction whose outcome is unknown: only the caller knows whether the
        transaction is guarded, and may retry it.
        """
        ...

    def watch(
        self, key: str, range_end: str | None, *, start_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchBatch]]:
        """Yield every change of the range from `start_revision` on: ordered, without gaps.

        After the loss of a connection the watch resumes after the last revision that it yielded. The watch raises
        `Compacted` if that revision was compacted. It yields only whole revisions. A caller that leaves the context
        by `TimeoutError` thereby reports that the watch is late: the next watch is opened at another endpoint, if
        possible.
        """
        ...

    async def grant(self, ttl_s: int) -> Lease:
        """Return a new lease of about `ttl_s` seconds."""
        ...

    async def keep_alive(self, lease_id: int) -> int:
        """Renew the lease once and return its new TTL in seconds; `NotFound` if the lease does not exist any more."""
        ...

    async def revoke(self, lease_id: int) -> None:
        """End the lease and delete its keys; a lease that has already ended is no error."""
        ...

    async def compact(self, revision: int) -> None:
        """Drop history before `revision`; an already compacted revision is no error."""
        ...
