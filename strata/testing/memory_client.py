"""`MemoryClient`: a client of the in-memory etcd that implements the `Store` protocol, with injectable faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from strata.core.kv.txn import Lease, Range, RangeResult, Txn, TxnResult, WatchBatch
from strata.errors import StrataError, Unavailable
from strata.testing.memory_etcd import MemoryEtcd
from strata.testing.memory_watch import MemoryWatch
from strata.testing.mvcc import Revision
from strata.testing.network import Call, Fate, Kind, Network, PromptNetwork
from strata.testing.processes import BETWEEN

_T = TypeVar("_T")


class MemoryClient:
    """A `Store`; made by `MemoryStore.client`.

    A call without a response for `request_s` raises `Unavailable`. An idle watch yields a progress notice every
    `progress_s`.
    """

    def __init__(
        self,
        store: MemoryEtcd,
        name: str,
        *,
        network: Network | None,
        request_s: float,
        progress_s: float,
    ) -> None:
        self.store = store
        self.name = name
        self.network: Network = PromptNetwork() if network is None else network
        self.progress_s = progress_s
        self.cut_off = False
        self._request_s = request_s
        self._closed = False
        self._pending: set[asyncio.Future[Any]] = set()
        self._watches: list[MemoryWatch] = []
        self._unsubscribe = store.subscribe(self._written)

    # -- faults ----------------------------------------------------------------------------------

    def partition(self) -> None:
        """Cut the client off: requests and responses in transit are lost, and watches receive nothing."""
        self.cut_off = True

    def heal(self) -> None:
        """End the partition; watches catch up from their last revision."""
        self.cut_off = False
        for watch in self._watches:
            watch.catch_up()

    def break_watches(self) -> int:
        """End every watch, as etcd may at any time; return their number."""
        for watch in self._watches:
            watch.fail(self._unavailable("the watch was cancelled"))
        return len(self._watches)

    async def close(self) -> None:
        """Drop the connection: calls in flight and watches end with `Unavailable`.

        Requests that were sent may still take effect.
        """
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        for watch in self._watches:
            watch.fail(self._unavailable("closed"))
        for pending in self._pending:
            if not pending.done():
                pending.set_exception(self._unavailable("closed"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- Store -----------------------------------------------------------------------------------

    async def read(self, request: Range) -> RangeResult:
        return await self._call("read", request, lambda: self.store.read(request))

    async def execute(self, txn: Txn) -> TxnResult:
        return await self._call("execute", txn, lambda: self.store.execute(txn))

    def watch(self, key: str, range_end: str | None, *, start_revision: int) -> MemoryWatch:
        return MemoryWatch(self, key, range_end, start_revision=start_revision)

    async def grant(self, ttl_s: int) -> Lease:
        return await self._call("grant", ttl_s, lambda: self.store.grant(ttl_s))

    async def keep_alive(self, lease_id: int) -> int:
        return await self._call("keep_alive", lease_id, lambda: self.store.keep_alive(lease_id))

    async def revoke(self, lease_id: int) -> None:
        await self._call("revoke", lease_id, lambda: self.store.revoke(lease_id))

    async def compact(self, revision: int) -> None:
        await self._call("compact", revision, lambda: self.store.compact(revision))

    # -- one call ----------------------------------------------------------------------------------

    async def _call(self, kind: Kind, argument: Range | Txn | int, effect: Callable[[], _T]) -> _T:
        if self._closed:
            raise self._unavailable("closed")
        call = Call(client=self.name, kind=kind, argument=argument)
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._send(call, self.network.fate(call), effect, answer)
        self._pending.add(answer)
        try:
            async with asyncio.timeout(self._request_s):
                return await answer
        except TimeoutError:
            raise self._unavailable(f"{kind} was not answered in {self._request_s} s") from None
        finally:
            self._pending.discard(answer)

    def _send(self, call: Call, fate: Fate, effect: Callable[[], _T], answer: asyncio.Future[_T]) -> None:
        """Send a request, which takes effect even if the caller no longer waits."""

        def arrive() -> None:
            if self.cut_off:
                return
            if fate.lost == "request":
                deliver(self._unavailable(f"the request was lost ({call.kind})"))
                return
            outcome: _T | StrataError
            try:
                outcome = effect()
            except StrataError as error:
                outcome = error
            self.network.applied(call)
            if fate.lost == "answer":
                outcome = self._unavailable(f"the answer was lost ({call.kind})")
            _after(fate.answer_delay_s, lambda: deliver(outcome))

        def deliver(outcome: _T | StrataError) -> None:
            if self.cut_off or answer.done():
                return
            if isinstance(outcome, StrataError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        _after(fate.delay_s, arrive)

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(f"{self.name}: {why}", hint="")

    # -- for its watches ---------------------------------------------------------------------------

    def attach(self, watch: MemoryWatch) -> None:
        """Begin to feed a watch."""
        if self._closed:
            watch.fail(self._unavailable("closed"))
            return
        self._watches.append(watch)
        if not self.cut_off:
            watch.catch_up()

    def detach(self, watch: MemoryWatch) -> None:
        """Stop feeding a watch."""
        if watch in self._watches:
            self._watches.remove(watch)

    def watch_delay_s(self, batch: WatchBatch) -> float:
        """Return the delay of this batch in transit."""
        return self.network.watch_delay_s(self.name, batch)

    def _written(self, written: Revision) -> None:
        if not self.cut_off:
            for watch in self._watches:
                watch.push(written)


def _after(delay_s: float, action: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    if delay_s > 0:
        loop.call_later(delay_s, action, context=BETWEEN)
    else:
        # `call_soon` keeps the order of calls; timers that are due at the same moment would not
        loop.call_soon(action, context=BETWEEN)
