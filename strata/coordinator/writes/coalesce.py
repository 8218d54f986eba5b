"""Coalescing of many small transactions into one (PROTOCOLS 2.5).

Transactions that arrive during a commit go into the next one: there is no timer, and no delay if no commit is
in progress. A batch contains all compares and all writes of its parts. No part compares a key that another part
writes. So the batch succeeds only if each part would succeed after the others. For example, a pin, and a deletion
that compares the absence of pins, never both succeed. If the batch fails, each part is executed alone, and only parts
whose own compares fail report a failure. If the batch's outcome is unknown, so is the outcome of each part.

Transactions that cannot be joined are executed side by side. For example, a thousand members that begin a new
job all write its spec. One of these transactions succeeds; the others must not wait in a queue only to fail.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from strata.core.kv.store import Store
from strata.core.kv.txn import MAX_TXN_BYTES, Compare, Delete, Put, Txn, TxnResult
from strata.errors import InvalidArgument, QuotaExceeded, StrataError

MAX_BATCH: Final = 100
"""The most compares of one transaction, and the most writes (PROTOCOLS 2.1, 2.5)."""
AT_ONCE: Final = 64
"""The most transactions that could not be joined and are in progress at the same time."""


@dataclass(frozen=True, slots=True)
class _Part:
    txn: Txn
    answer: asyncio.Future[TxnResult]


class Coalescer:
    """Executes transactions, joining those that wait. `run` does the work."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: deque[_Part] = deque()
        self._arrived = asyncio.Event()

    async def execute(self, txn: Txn) -> TxnResult:
        """Execute `txn` as the store would, perhaps together with others."""
        part = _Part(txn, asyncio.get_running_loop().create_future())
        self._queue.append(part)
        self._arrived.set()
        return await part.answer

    async def run(self) -> None:
        """Execute queued transactions until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._queue:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(AT_ONCE):
                        if not self._queue:
                            break
                        tasks.create_task(self._commit(self._take()))

    def _take(self) -> list[_Part]:
        """Take the longest head of the queue that makes one valid transaction."""
        batch = [self._queue.popleft()]
        size = _Size(batch[0].txn)
        while size.joinable and self._queue and size.add(self._queue[0].txn):
            batch.append(self._queue.popleft())
        return [part for part in batch if not part.answer.cancelled()]

    async def _commit(self, batch: list[_Part]) -> None:
        """Execute a batch, joined if possible; each part receives its own outcome."""
        if len(batch) == 1:
            await self._alone(batch[0])
            return
        if batch:
            joint = Txn(
                compares=tuple(dict.fromkeys(c for part in batch for c in part.txn.compares)),
                success=tuple(op for part in batch for op in part.txn.success),
            )
            try:
                result = await self._store.execute(joint)
            except (InvalidArgument, QuotaExceeded):
                pass  # perhaps only one part fails: each is executed alone below
            except StrataError as error:
                for part in batch:
                    _fail(part, error)
                return
            else:
                if result.succeeded:
                    for part in batch:
                        _finish(part, result)
                    return
        async with asyncio.TaskGroup() as tasks:
            for part in batch:
                tasks.create_task(self._alone(part))

    async def _alone(self, part: _Part) -> None:
        try:
            _finish(part, await self._store.execute(part.txn))
        except StrataError as error:
            _fail(part, error)


class _Size:
    """The size and keys of a batch so far, and whether one more transaction fits."""

    def __init__(self, txn: Txn) -> None:
        self.joinable = _simple(txn)
        self._compares = set(txn.compares)
        self._compared = _Compared(txn)
        self._keys = _written(txn)
        self._bytes = _bytes(txn)

    def add(self, txn: Txn) -> bool:
        """Add `txn`; return False if it does not fit. For example, etcd forbids two writes of one key."""
        if not _simple(txn):
            return False
        keys, compares, compared = _written(txn), self._compares.union(txn.compares), _Compared(txn)
        size = self._bytes + _bytes(txn)
        if (
            keys & self._keys
            or self._compared.any_of(keys)
            or compared.any_of(self._keys)
            or len(keys) + len(self._keys) > MAX_BATCH
            or len(compares) > MAX_BATCH
            or size > MAX_TXN_BYTES
        ):
            return False
        self._keys |= keys
        self._compares = compares
        self._compared.add(compared)
        self._bytes = size
        return True


class _Compared:
    """The keys that transactions compare."""

    def __init__(self, txn: Txn) -> None:
        self._keys = {c.key for c in txn.compares if c.range_end is None}
        self._ranges = {(c.key, c.range_end) for c in txn.compares if c.range_end is not None}

    def any_of(self, keys: set[str]) -> bool:
        """True if one of `keys` is compared."""
        if not self._keys.isdisjoint(keys):
            return True
        return any(start <= key < end for start, end in self._ranges for key in keys)

    def add(self, other: _Compared) -> None:
        """Add the compares of `other`."""
        self._keys |= other._keys
        self._ranges |= other._ranges


def _simple(txn: Txn) -> bool:
    """True if the transaction only writes single keys and reads nothing."""
    return not txn.failure and all(
        isinstance(op, Put) or (isinstance(op, Delete) and op.range_end is None) for op in txn.success
    )


def _written(txn: Txn) -> set[str]:
    return {op.key for op in txn.success}


def _bytes(txn: Txn) -> int:
    values = sum(len(op.value) for op in txn.success if isinstance(op, Put))
    return values + sum(len(op.key) + 16 for op in txn.success) + sum(map(_weight, txn.compares))


def _weight(compare: Compare) -> int:
    return len(compare.key) + len(compare.range_end or "") + 32


def _finish(part: _Part, result: TxnResult) -> None:
    if not part.answer.done():
        part.answer.set_result(result)


def _fail(part: _Part, error: StrataError) -> None:
    """Fail a part with an exception of its own: raising one exception twice would join the tracebacks."""
    if not part.answer.done():
        part.answer.set_exception(type(error)(error.message, hint=error.hint))
