"""Many small transactions as one (PROTOCOLS 2.5).

What arrives while a commit is under way goes into the next one: no timer, and no delay when there
is nothing to wait for. The batch holds all compares and all writes of its parts, and no part
compares what another one writes, so it succeeds only if each part would after the others: a pin
and the deletion that compares its absence never come true together. If it fails, each part is executed alone, and the one whose compares do
not hold learns it. If its outcome is unknown, that is the outcome of each part.

What does not fit together goes side by side: a thousand members that begin a new job all write its
spec, one of them succeeds, and the others must not wait in line to find that out.
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
"""Compares, and writes, of one transaction (PROTOCOLS 2.1, 2.5)."""
AT_ONCE: Final = 64
"""Transactions under way that could not be joined."""


@dataclass(frozen=True, slots=True)
class _Part:
    txn: Txn
    answer: asyncio.Future[TxnResult]


class Coalescer:
    """Executes transactions, joining those that wait. `run` does the work."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: deque[_Part] = deque()
        self._came = asyncio.Event()

    async def execute(self, txn: Txn) -> TxnResult:
        """Execute `txn` as the store would, perhaps together with others."""
        part = _Part(txn, asyncio.get_running_loop().create_future())
        self._queue.append(part)
        self._came.set()
        return await part.answer

    async def run(self) -> None:
        """Execute what is queued until cancelled."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._queue:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(AT_ONCE):
                        if not self._queue:
                            break
                        tasks.create_task(self._commit(self._take()))

    def _take(self) -> list[_Part]:
        """Take the longest head of the queue that makes one legal transaction."""
        batch = [self._queue.popleft()]
        size = _Size(batch[0].txn)
        while size.joinable and self._queue and size.add(self._queue[0].txn):
            batch.append(self._queue.popleft())
        return [part for part in batch if not part.answer.cancelled()]

    async def _commit(self, batch: list[_Part]) -> None:
        """Execute a batch, joined if it can be; each part learns its own outcome."""
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
                pass  # perhaps only of one part
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
    """What a batch holds so far, and whether one more transaction still fits."""

    def __init__(self, txn: Txn) -> None:
        self.joinable = _simple(txn)
        self._compares = set(txn.compares)
        self._compared = _Compared(txn)
        self._keys = _written(txn)
        self._bytes = _bytes(txn)

    def add(self, txn: Txn) -> bool:
        """Add `txn` unless it does not fit: etcd forbids two writes of one key, for one."""
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
        """Tell whether one of `keys` is compared."""
        if not self._keys.isdisjoint(keys):
            return True
        return any(start <= key < end for start, end in self._ranges for key in keys)

    def add(self, other: _Compared) -> None:
        """Take over what `other` compares."""
        self._keys |= other._keys
        self._ranges |= other._ranges


def _simple(txn: Txn) -> bool:
    """Tell whether it only writes single keys and asks for nothing back."""
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
    """Every waiter gets an exception of its own: raising one twice would join their tracebacks."""
    if not part.answer.done():
        part.answer.set_exception(type(error)(error.message, hint=error.hint))
