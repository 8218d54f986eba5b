"""Watches for clients, with etcd's promises: ordered, without gaps, resumable (PROTOCOLS 3).

Each watch reads the replica's history from the revision that its client has seen. If a client is more than
`QUEUE_EVENTS` behind, or its token is older than the history, the client receives the whole state (`resync`). That
state is never older than the state that the client has seen. So no events are queued for a client, and a client
learns of every gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from typing import Final

from strata.coordinator.context import ReplicaContext
from strata.coordinator.view import floors
from strata.core.ids import Uid
from strata.core.kv.txn import Event, KeyValue, WatchBatch
from strata.errors import Unavailable
from strata.v1 import watch_pb2 as pb
from strata.wire import tokens

QUEUE_EVENTS: Final = 2_000
"""How many events a watcher may be behind before it is resynced."""
CHUNK_BYTES: Final = 256 << 10
"""Bytes of values in one message. A resync of a large job takes several messages; the first carries the flag
`resync`."""
PROGRESS_S: Final = 5.0
"""How often a watch without changes sends its revision."""


class Watches:
    """Serves `Watch` from the mirror's view and history."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._changed: set[asyncio.Event] = set()
        """One event for each watch, set when it has something to send."""
        self._stopped = False

    def stop(self) -> None:
        """End every watch: this replica stops."""
        self._stopped = True
        for changed in self._changed:
            changed.set()

    async def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """Yield the changes below a job's prefix; raise an error for an invalid request."""
        mirror = self._context.mirror
        await floors.honour(mirror, request.token)
        root = self._context.keys.job(request.job).root
        prefix = root + request.prefix
        changed = asyncio.Event()

        def look(batch: WatchBatch) -> None:
            listed = mirror.history.floor >= batch.revision
            if listed or any(event.kv.key.startswith(prefix) for event in batch.events):
                changed.set()

        leave = mirror.subscribe(look)
        self._changed.add(changed)
        seen = request.token.revision if request.token.uid else None
        lists = mirror.history.lists
        try:
            while not self._stopped:
                changed.clear()
                # a new list is a gap, even if the client has already seen the list's revision
                missed = self._missed(prefix, seen) if lists == mirror.history.lists else None
                if seen is None or missed is None:
                    seen, lists = mirror.view.revision, mirror.history.lists
                    for response in self._resync(root, prefix, seen):
                        yield response
                    continue
                for revision, events in missed:
                    if lists != mirror.history.lists:
                        break
                    seen = revision
                    yield pb.WatchResponse(
                        events=[_event(root, event.kv, deleted=event.deleted) for event in events],
                        token=tokens.token(mirror.uid, seen),
                    )
                if not missed:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PROGRESS_S):
                            await changed.wait()
                    if not changed.is_set():
                        seen = max(seen, mirror.view.revision)
                        yield pb.WatchResponse(token=tokens.token(mirror.uid, seen))
            raise Unavailable("this replica stops", hint="resume the watch at another one")
        finally:
            self._changed.discard(changed)
            leave()

    def _missed(self, prefix: str, seen: int | None) -> list[tuple[int, list[Event]]] | None:
        """Return the changes below the prefix after `seen`, by revision; None if a resync is needed."""
        batches = None if seen is None else self._context.mirror.history.since(seen)
        if batches is None:
            return None
        below = (
            (batch.revision, [event for event in batch.events if event.kv.key.startswith(prefix)])
            for batch in batches
        )
        found = [(revision, events) for revision, events in below if events]
        return found if sum(len(events) for _revision, events in found) <= QUEUE_EVENTS else None

    def _resync(self, root: str, prefix: str, revision: int) -> Iterable[pb.WatchResponse]:
        """Return the state at `revision` as messages; only the last carries the token.

        A client that loses the stream before the last message has no token of the new state, and lists again.
        All keys are collected first, but each message is made on demand: a slow reader keeps only one message in
        memory.
        """
        mirror = self._context.mirror
        walked = mirror.view.walk(prefix.rpartition("/")[0])
        return _chunks(root, [kv for kv in walked if kv.key.startswith(prefix)], mirror.uid, revision)


def _chunks(root: str, state: Iterable[KeyValue], uid: Uid, revision: int) -> Iterator[pb.WatchResponse]:
    response, size = pb.WatchResponse(resync=True), 0
    for kv in state:
        size += len(kv.value) + len(kv.key)
        if size > CHUNK_BYTES and response.events:
            yield response
            response, size = pb.WatchResponse(), len(kv.value) + len(kv.key)
        response.events.append(_event(root, kv, deleted=False))
    response.token.CopyFrom(tokens.token(uid, revision))
    yield response


def _event(root: str, kv: KeyValue, *, deleted: bool) -> pb.KeyEvent:
    return pb.KeyEvent(
        key=kv.key.removeprefix(root),
        value=b"" if deleted else kv.value,
        deleted=deleted,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
    )
