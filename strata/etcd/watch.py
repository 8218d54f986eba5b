"""A watch that survives its connection: ordered, without gaps, whole revisions only.

Each watch has a gRPC stream of its own. etcd answers a progress request for a whole stream, and only when every
watch on the stream is caught up. A reader that falls behind delays its whole stream. So on a shared stream,
watches would stall and silence each other. Streams share the connection, so another stream costs little.

The rules (PROTOCOLS 3.2):

- *Position* is the revision of the last event delivered, or of a progress notice. The position is not the
  revision in the header of an event's answer: until a watch has caught up, the header already has a newer
  revision.
- *A watch opens at its position*, not after it: etcd answers no progress request while a watch starts in the
  future (3.5.30; observed, not documented). On an idle cluster the missing answers would look like a dead member.
  If only the position's own revision was compacted, the watch opens after it.
- *Events* not newer than the position are dropped. Fragments are joined before any event is delivered; the
  joined answers end at revision boundaries.
- *Progress* notices are accepted only after the watch was confirmed, and never move the position backwards. Older
  members answered a request before they had caught up (etcd#15220, fixed in 3.4.25 and 3.5.8); their notices count
  only as a sign of life.
- *A stream that ends is a break*: it is reopened at another endpoint, with jittered pauses. Only three causes
  reach the caller: the revision was compacted, the user may not read the keys, or the cluster was replaced.
- *Silence* is a break as well; see `watch_stream`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import grpc

from strata.core.kv.store import Compacted
from strata.core.kv.txn import WatchBatch
from strata.errors import InvalidArgument, Unavailable
from strata.etcd import codec, errors
from strata.etcd.connection import Connection
from strata.etcd.watch_stream import BrokenError, WatchStream
from strata.etcdapi import mvcc_pb2, watch_pb2


class Watch:
    """An asynchronous iterator of `WatchBatch`, to be entered as a context."""

    def __init__(
        self,
        connection: Connection,
        key: str,
        range_end: str | None,
        *,
        start_revision: int,
        trust_progress: bool,
    ) -> None:
        if start_revision < 1:
            raise InvalidArgument(
                f"a watch starts at a revision above 0, not {start_revision}",
                hint="list first, and watch from the revision after the list's",
            )
        self._connection = connection
        self._key = codec.key_bytes(key)
        self._end = codec.end_bytes(range_end)
        self._seen = start_revision - 1
        self._open_after = False
        self._trust_progress = trust_progress
        self._stream: WatchStream | None = None
        self._pieces: list[mvcc_pb2.Event] = []
        self._failures = 0
        self.breaks = 0
        """Number of times the stream was lost and opened again, for metrics."""

    @property
    def endpoint(self) -> str | None:
        """The member that serves the watch now, or None."""
        return None if self._stream is None else self._stream.endpoint.name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if isinstance(error, TimeoutError) and self._stream is not None:
            self._connection.blame(self._stream.endpoint)  # the caller found the watch late
        self._close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchBatch:
        """Return the next whole revisions; cancelling the call loses nothing."""
        while True:
            try:
                batch = await self._next(self._stream or await self._open())
            except BrokenError as error:
                await self._broken(error)
            else:
                if batch is not None:
                    self._seen = batch.revision
                    self._failures = 0
                    self._open_after = False
                    return batch

    async def _broken(self, error: BrokenError) -> None:
        if self._stream is not None:
            self.breaks += 1
            if error.blame:
                self._connection.blame(self._stream.endpoint)
        self._close()
        self._failures += 1
        timing = self._connection.timing
        await timing.sleep(timing.pause_s(self._failures))

    async def _open(self) -> WatchStream:
        connection = self._connection
        try:
            endpoint = await connection.ready_endpoint(connection.timing.open_s)
        except Unavailable as error:
            if connection.closed:
                raise
            raise BrokenError(error.message) from error
        stream = self._stream = WatchStream(connection, endpoint)
        request = watch_pb2.WatchCreateRequest(
            key=self._key,
            range_end=self._end,
            start_revision=self._seen + 1 if self._open_after else max(1, self._seen),
            progress_notify=True,
            fragment=True,
        )
        try:
            await stream.create(request)
        except BrokenError:
            raise
        except BaseException:
            # the next call must not continue to read an unconfirmed stream
            self._close()
            raise
        return stream

    async def _next(self, stream: WatchStream) -> WatchBatch | None:
        """Return the batch that the next answer completes, or None."""
        answer = await stream.receive()
        if answer.canceled:
            await self._canceled(stream, answer)
        if answer.fragment:
            self._pieces.extend(answer.events)
            return None
        if not answer.events and not self._pieces:
            return self._progress(answer.header.revision)
        pieces, self._pieces = self._pieces, []
        pieces.extend(answer.events)
        events = codec.decode_events(pieces, self._seen)
        return WatchBatch(revision=events[-1].kv.mod_revision, events=events) if events else None

    def _progress(self, revision: int) -> WatchBatch | None:
        if not self._trust_progress or revision < self._seen:
            return None
        return WatchBatch(revision=revision)

    async def _canceled(self, stream: WatchStream, answer: watch_pb2.WatchResponse) -> None:
        oldest = answer.compact_revision
        if oldest == self._seen + 1 and not self._open_after:
            # etcd still has the revisions that the caller needs; only the position itself, requested in
            # addition, is compacted
            self._open_after = True
            raise BrokenError("the position is one before the oldest left", blame=False)
        if oldest:
            self._close()
            raise Compacted(
                f"etcd {stream.endpoint.name}: revision {self._seen + 1} was compacted, "
                f"{oldest} is the oldest left"
            )
        await stream.judge(grpc.StatusCode.UNKNOWN, errors.plain(answer.cancel_reason))

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        self._pieces = []
        if stream is not None:
            stream.close()
