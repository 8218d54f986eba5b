"""`MemoryWatch`: a watch on the in-memory store.

The store delivers every write to a connected watch immediately, as etcd does, so a later compaction loses no events.
When a partition heals, a watch catches up from history in one batch. It ends with `Compacted` if the missing events
are compacted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from strata.core.kv.store import Compacted
from strata.core.kv.txn import WatchBatch
from strata.errors import InvalidArgument, StrataError
from strata.testing.memory_etcd import MemoryEtcd
from strata.testing.mvcc import Revision, covers


class Connection(Protocol):
    """The part of a client that its watches use."""

    store: MemoryEtcd
    progress_s: float
    cut_off: bool

    def attach(self, watch: MemoryWatch) -> None:
        """Begin to feed a watch."""
        ...

    def detach(self, watch: MemoryWatch) -> None:
        """Stop feeding a watch."""
        ...

    def watch_delay_s(self, batch: WatchBatch) -> float:
        """Return the delay of this batch in transit."""
        ...


class MemoryWatch:
    """An asynchronous iterator of `WatchBatch`, to be entered as a context; see `Store.watch`."""

    def __init__(self, client: Connection, key: str, range_end: str | None, *, start_revision: int) -> None:
        if start_revision < 1:
            raise InvalidArgument(f"a watch starts at a revision above 0, not {start_revision}")
        if not key:
            raise InvalidArgument("key is not provided")
        self._client = client
        self._key = key
        self._end = range_end
        self._sent = start_revision - 1
        """Every event up to this revision was delivered or is outside the watched range."""
        self._on_the_way: deque[tuple[float, WatchBatch]] = deque()
        self._error: StrataError | None = None
        self._wake = asyncio.Event()
        self._active = True

    async def __aenter__(self) -> Self:
        self._client.attach(self)
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._active = False
        self._client.detach(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchBatch:
        """Return the next complete revisions, or a progress notice after `progress_s` without revisions."""
        loop = asyncio.get_running_loop()
        notice_at = loop.time() + self._client.progress_s
        while True:
            if self._on_the_way:
                due, batch = self._on_the_way[0]
                if due <= loop.time():
                    self._on_the_way.popleft()
                    return batch
            elif self._error is not None:
                raise self._error
            else:
                due = notice_at
                if due <= loop.time():
                    notice = self._notice()
                    if notice is not None:
                        return notice
                    notice_at = due = loop.time() + self._client.progress_s
            self._wake.clear()
            try:
                async with asyncio.timeout_at(due):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _notice(self) -> WatchBatch | None:
        """Return a progress notice, or None if the store is unreachable or behind the watch's start revision."""
        head = self._client.store.state.head
        if self._client.cut_off or head < self._sent:
            return None
        return WatchBatch(revision=head)

    def catch_up(self) -> None:
        """Queue the revisions of history after `_sent`, at the start and after a partition."""
        state = self._client.store.state
        if self._error is None and self._sent < state.head:
            try:
                self._take(state.history(self._sent + 1))
            except Compacted as error:
                self.fail(error)
            self._sent = state.head

    def push(self, written: Revision) -> None:
        """Queue a write when it happens."""
        if written.number > self._sent:
            self._take([written])
            self._sent = written.number

    def fail(self, error: StrataError) -> None:
        """End the watch with an error, after the batches in transit."""
        if self._error is None:
            self._error = error
            self._wake.set()

    def _take(self, revisions: Iterable[Revision]) -> None:
        events = tuple(
            event
            for written in revisions
            for event in written.events
            if covers(self._key, self._end, event.kv.key)
        )
        if events and self._error is None:
            batch = WatchBatch(revision=events[-1].kv.mod_revision, events=events)
            due = asyncio.get_running_loop().time() + self._client.watch_delay_s(batch)
            if self._on_the_way:
                due = max(due, self._on_the_way[-1][0])
            self._on_the_way.append((due, batch))
            self._wake.set()
