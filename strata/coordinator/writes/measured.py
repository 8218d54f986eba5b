"""A store that measures requests: their duration and outcome. It also reports how writes ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

from strata.coordinator.measures import Measures
from strata.core.kv.store import Store
from strata.core.kv.txn import Lease, Put, Range, RangeResult, Txn, TxnResult, WatchBatch
from strata.errors import ClusterReplaced, StrataError, Unavailable

T = TypeVar("T")


KINDS: Final = ("read", "txn", "lease_grant", "lease_keep_alive", "lease_revoke", "compact")


class MeasuredStore:
    """A `Store` that counts its requests to another store into `measures`.

    `revision` is the newest revision in an answer to a read or a transaction; the watch has yet to deliver the
    revisions between the view's revision and this one. A transaction whose compares failed was answered, so it
    counts as ok. `on_write` receives the result of each write: None, or an error. `on_answer` is called with
    every answer. `replaced` is the first error that shows that etcd was replaced; the replica waits for this
    error and then ends. Callers receive `Unavailable` instead: a member that retries then learns whether the
    cluster was restored.
    """

    def __init__(self, store: Store, measures: Measures) -> None:
        self.on_write: Callable[[StrataError | None], None] = lambda _error: None
        self.on_answer: Callable[[], None] = lambda: None
        self.revision = 0
        self.replaced: asyncio.Future[ClusterReplaced] = asyncio.get_running_loop().create_future()
        self._store = store
        self._seconds = measures.etcd_seconds
        for kind in KINDS:
            for outcome in ("ok", "refused", "unavailable"):
                self._seconds.child(kind, outcome)  # present from the start

    async def _timed(self, kind: str, request: Awaitable[T]) -> T:
        """Return the answer, and measure its duration."""
        now = asyncio.get_running_loop().time
        began = now()
        try:
            answer = await request
        except StrataError as error:
            outcome = "unavailable" if isinstance(error, Unavailable) else "refused"
            self._seconds.child(kind, outcome).observe(now() - began)
            if isinstance(error, ClusterReplaced):
                if not self.replaced.done():
                    self.replaced.set_result(error)
                raise Unavailable(error.message, hint=error.hint) from error
            raise
        self._seconds.child(kind, "ok").observe(now() - began)
        self.on_answer()
        return answer

    async def read(self, request: Range) -> RangeResult:
        answer = await self._timed("read", self._store.read(request))
        self.revision = max(self.revision, answer.revision)
        return answer

    async def execute(self, txn: Txn) -> TxnResult:
        try:
            answer = await self._timed("txn", self._store.execute(txn))
        except StrataError as error:
            self.on_write(error)
            raise
        if any(isinstance(operation, Put) for operation in (*txn.success, *txn.failure)):
            # a transaction that only deletes proves nothing: etcd accepts it even without space
            self.on_write(None)
        self.revision = max(self.revision, answer.revision)
        return answer

    def watch(
        self, key: str, range_end: str | None, *, start_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchBatch]]:
        return self._store.watch(key, range_end, start_revision=start_revision)  # the mirror counts watches

    async def grant(self, ttl_s: int) -> Lease:
        try:
            return await self._timed("lease_grant", self._store.grant(ttl_s))
        except StrataError as error:
            self.on_write(error)  # without space etcd grants no lease
            raise

    async def keep_alive(self, lease_id: int) -> int:
        return await self._timed("lease_keep_alive", self._store.keep_alive(lease_id))

    async def revoke(self, lease_id: int) -> None:
        await self._timed("lease_revoke", self._store.revoke(lease_id))

    async def compact(self, revision: int) -> None:
        await self._timed("compact", self._store.compact(revision))
