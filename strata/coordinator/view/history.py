"""The recent changes of the keyspace, so that a client's watch can resume without a new list."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import Final

from strata.core.kv.txn import WatchBatch

MAX_EVENTS: Final = 20_000


class History:
    """A bounded ring of batches, with every change after `floor`."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self.floor = 0
        self.lists = 0
        """How many times the mirror replaced the view by a new list."""
        self._max_events = max_events
        self._events = 0
        self._batches: deque[WatchBatch] = deque()

    def reset(self, revision: int) -> None:
        """Forget everything: only the result of the changes before `revision` is known."""
        self._batches.clear()
        self._events = 0
        self.lists += 1
        self.floor = revision

    def append(self, batch: WatchBatch) -> None:
        """Add a batch, dropping the oldest ones if necessary."""
        if not batch.events:
            return
        self._batches.append(batch)
        self._events += len(batch.events)
        while self._events > self._max_events:
            oldest = self._batches.popleft()
            self._events -= len(oldest.events)
            self.floor = oldest.revision

    def since(self, revision: int) -> Iterator[WatchBatch] | None:
        """Return the changes after `revision`, or None if some are no longer stored: the caller must then list
        again.

        A batch may contain many revisions, and the revision of another replica's token may be in the middle of
        a batch. Of such a batch, only the changes after the token's revision are returned.
        """
        if revision < self.floor:
            return None
        newer = list(takewhile(lambda batch: batch.revision > revision, reversed(self._batches)))
        return (_rest(batch, revision) for batch in reversed(newer))


def _rest(batch: WatchBatch, revision: int) -> WatchBatch:
    if batch.events[0].kv.mod_revision > revision:
        return batch
    events = tuple(event for event in batch.events if event.kv.mod_revision > revision)
    return WatchBatch(revision=batch.revision, events=events)
