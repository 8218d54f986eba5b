"""Watches relayed to clients, with etcd's promises: ordered, without gaps, resumable (PROTOCOLS 3).

A watcher gets what the view gets, as long as it keeps up. One that does not, or whose token is
older than the history kept here, is given the whole state anew (`resync`), which is never older
than what it has. So its queue is bounded, and there is never a gap that it does not learn of.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Final

from strata.coordinator.context import ReplicaContext
from strata.coordinator.view import floors
from strata.coordinator.view.history import History
from strata.core.ids import Uid
from strata.core.txn import Event, KeyValue, WatchBatch
from strata.errors import Unavailable
from strata.v1 import watch_pb2 as pb
from strata.wire import tokens

QUEUE_EVENTS: Final = 2_000
"""How many events a slow watcher may owe; then it is resynced."""
CHUNK_BYTES: Final = 256 << 10
"""Of values in one message: a resync of a large job comes in several, the first with the flag."""
PROGRESS_S: Final = 5.0
"""How often a quiet watch says how far it is."""


class Watches:
    """Serves `Watch` from the mirror's view and history."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._watchers: set[_Watcher] = set()
        self._stopped = False

    def stop(self) -> None:
        """End every watch: this replica stops."""
        self._stopped = True
        for watcher in self._watchers:
            watcher.wake()

    async def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """Yield the changes below a job's prefix; raises what makes the request impossible."""
        mirror = self._context.mirror
        await floors.honour(mirror, request.token)
        root = self._context.keys.job(request.job).root
        watcher = _Watcher(root, root + request.prefix, mirror.history)
        leave = mirror.subscribe(watcher.take)
        self._watchers.add(watcher)
        try:
            seen = self._resume(watcher, request.token.revision if request.token.uid else None)
            while not self._stopped:
                if watcher.overflowed or seen is None:
                    watcher.restart()
                    seen = mirror.view.revision
                    for response in self._resync(watcher, seen):
                        yield response
                responses, seen = watcher.responses(mirror.uid, seen)
                for response in responses:
                    yield response
                if not watcher.pending:
                    await watcher.wait(PROGRESS_S)
                    if watcher.idle:
                        seen = max(seen, mirror.view.revision)
                        yield pb.WatchResponse(token=tokens.token(mirror.uid, seen))
            raise Unavailable("this replica stops", hint="resume the watch at another one")
        finally:
            self._watchers.discard(watcher)
            leave()

    def _resume(self, watcher: _Watcher, revision: int | None) -> int | None:
        """Queue what happened after `revision`; return it, or None where only a list helps."""
        if revision is None:
            return None
        missed = self._context.mirror.history.since(revision)
        if missed is None:
            return None
        for batch in missed:
            watcher.take(batch)
        return revision

    def _resync(self, watcher: _Watcher, revision: int) -> Iterable[pb.WatchResponse]:
        """Return the state at `revision` as messages; only the last carries the token.

        A client that loses the stream in between has no token of the new state and lists again.
        The keys are taken at once. A message is made when it is asked for: of a slow reader's there is one.
        """
        mirror = self._context.mirror
        walked = mirror.view.walk(watcher.prefix.rpartition("/")[0])
        return _chunks(
            watcher, [kv for kv in walked if kv.key.startswith(watcher.prefix)], mirror.uid, revision
        )


def _chunks(
    watcher: _Watcher, state: Iterable[KeyValue], uid: Uid, revision: int
) -> Iterator[pb.WatchResponse]:
    response, size = pb.WatchResponse(resync=True), 0
    for kv in state:
        size += len(kv.value) + len(kv.key)
        if size > CHUNK_BYTES and response.events:
            yield response
            response, size = pb.WatchResponse(), len(kv.value) + len(kv.key)
        response.events.append(_event(watcher.root, kv, deleted=False))
    response.token.CopyFrom(tokens.token(uid, revision))
    yield response


class _Watcher:
    """What one watch has not been told yet."""

    def __init__(self, root: str, prefix: str, history: History) -> None:
        self._history = history
        self.root = root
        self.prefix = prefix
        self.pending: deque[tuple[int, tuple[Event, ...]]] = deque()
        self.overflowed = False
        self._events = 0
        self._woken = asyncio.Event()

    def take(self, batch: WatchBatch) -> None:
        """Queue the part of a batch that is below the prefix."""
        if self.overflowed:
            return
        events = tuple(event for event in batch.events if event.kv.key.startswith(self.prefix))
        # A list tells what the state is now, and not how it came: that is a gap, also where the
        # state is the same again.
        listed = self._history.floor >= batch.revision
        if not events and not listed:
            return
        self._events += len(events)
        if self._events > QUEUE_EVENTS or listed:
            self.overflowed = True
            self.pending.clear()
        else:
            self.pending.append((batch.revision, events))
        self._woken.set()

    @property
    def idle(self) -> bool:
        """Whether all that is known has been told."""
        return not self.pending and not self.overflowed

    def restart(self) -> None:
        """Forget what is queued: the state is told as a whole."""
        self.pending.clear()
        self.overflowed = False
        self._events = 0
        self._woken.clear()

    def responses(self, uid: str, seen: int) -> tuple[list[pb.WatchResponse], int]:
        """Take what is queued as messages of whole revisions; return them and how far they go."""
        found = []
        while self.pending:
            revision, events = self.pending.popleft()
            self._events -= len(events)
            if revision <= seen:
                continue
            seen = revision
            response = pb.WatchResponse(
                events=[_event(self.root, event.kv, deleted=event.deleted) for event in events]
            )
            response.token.uid, response.token.revision = uid, revision
            found.append(response)
        self._woken.clear()
        return found, seen

    def wake(self) -> None:
        """Let `wait` return."""
        self._woken.set()

    async def wait(self, limit_s: float) -> None:
        """Return when something is queued or overflowed, or after the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._woken.wait()
        except TimeoutError:
            pass


def _event(root: str, kv: KeyValue, *, deleted: bool) -> pb.KeyEvent:
    return pb.KeyEvent(
        key=kv.key.removeprefix(root),
        value=b"" if deleted else kv.value,
        deleted=deleted,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
    )
