"""A watch that survives its connection: ordered, without gaps, whole revisions only.

One gRPC stream a watch. etcd answers a progress request for a whole stream and only when every
watch on it is caught up, and a reader that falls behind holds up its stream; sharing one would let
watches stall and silence each other. Streams share the connection, so another costs little.

What is trusted (PROTOCOLS 3.2):

- *Position* is the revision of the last event delivered, or of a progress notice. Not the header of
  an event's answer: while etcd catches a watch up, that already names the newest revision.
- *A watch opens at its position*, not after it: etcd answers no progress request while a watch
  starts in the future (3.5.30; seen, not documented), which on an idle cluster would look like
  death. If just that one revision was compacted, it opens after it.
- *Events* not newer than the position are dropped. Fragments are joined before anything is handed
  out; with that, etcd's answers end at revision boundaries.
- *Progress* notices are taken only after the watch was confirmed, and never move backwards. Older
  members answered a request before they had caught up (etcd#15220, fixed in 3.4.25 and 3.5.8);
  from those a notice is a sign of life and nothing more.
- *Any end is a break*: the stream is reopened elsewhere, with jittered pauses. Only
  three ends are the caller's: the revision was compacted away, the user may not read the keys, the
  cluster was replaced.
- *Silence* is a break as well: progress is asked for every 5 s, and after 15 s without a word the
  stream moves. If calls to its member fail meanwhile, it is asked at once and given 3 s.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

import grpc
from grpc.aio import AioRpcError, StreamStreamCall

from strata.core.store import Compacted
from strata.core.txn import Event, WatchBatch
from strata.errors import ClusterReplaced, ConfigError, InvalidArgument, Refused, Unavailable
from strata.etcd import codec, errors
from strata.etcd.connection import Connection
from strata.etcd.endpoint import Endpoint
from strata.etcdapi import mvcc_pb2, watch_pb2

WatchCall = StreamStreamCall[watch_pb2.WatchRequest, watch_pb2.WatchResponse]

_ASK: Final = watch_pb2.WatchRequest(progress_request=watch_pb2.WatchProgressRequest())


class BrokenError(Exception):
    """This stream is of no use any more; another may be."""


class Stream:
    """One attempt at a watch: a stream to one endpoint, from its opening to its break."""

    def __init__(self, connection: Connection, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._connection = connection
        self._timing = connection.timing
        self._floor = connection.guard.term
        self._metadata = connection.login.plain
        self._call: WatchCall = endpoint.watch.Watch(metadata=connection.login.streams)
        self._reading: asyncio.Task[object] | None = None
        self._heard_at = self._asked_at = self._timing.now()
        self._confirmed = False

    async def create(self, request: watch_pb2.WatchCreateRequest) -> None:
        """Open the watch; return once etcd has confirmed it."""
        try:
            async with asyncio.timeout(self._timing.open_s):
                await self._write(watch_pb2.WatchRequest(create_request=request))
                answer = await self.receive()
        except TimeoutError:
            raise BrokenError("not confirmed in time") from None
        if not answer.created:
            raise BrokenError("etcd sent something else before its confirmation")
        self._confirmed = True

    async def receive(self) -> watch_pb2.WatchResponse:
        """Return the next answer; `BrokenError` when there will be none."""
        # Cancelling a read cancels the whole call. A task of its own lets the caller time out.
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._heard_at = self._timing.now()
        while not self._reading.done():
            await asyncio.wait((self._reading,), timeout=await self._tick())
        reading, self._reading = self._reading, None
        try:
            answer = reading.result()
        except AioRpcError as error:
            await self._explain(error)
        except asyncio.CancelledError:
            raise BrokenError("the call was closed") from None
        else:
            if isinstance(answer, watch_pb2.WatchResponse):
                self._heard_at = self._timing.now()
                try:
                    self._connection.guard.admit(answer.header, self._floor, self.endpoint.name)
                except Unavailable as error:
                    raise BrokenError(error.message) from error
                return answer
        raise BrokenError("etcd ended the stream")

    async def _tick(self) -> float:
        """Ask for progress when it is time, and return how long to wait for an answer."""
        timing, now = self._timing, self._timing.now()
        silent_s = now - self._heard_at
        # a call to this member failed since it was last heard on this stream
        suspected = self.endpoint.blamed_at > self._heard_at
        if silent_s >= timing.silence_s or (
            suspected and now - max(self.endpoint.blamed_at, self._asked_at) >= timing.open_s
        ):
            raise BrokenError(f"silent for {silent_s:.1f} s")
        if not self._confirmed:
            return timing.open_s
        if now - max(self._asked_at, self._heard_at) >= timing.progress_s or (
            suspected and self._asked_at < self.endpoint.blamed_at
        ):
            self._asked_at = now
            await self._write(_ASK)
        return min(1.0, timing.progress_s)

    async def _write(self, request: watch_pb2.WatchRequest) -> None:
        try:
            await self._call.write(request)
        except (AioRpcError, asyncio.InvalidStateError) as error:
            # the read says why
            if self._reading is None:
                raise BrokenError("the stream did not open") from error

    async def _explain(self, error: AioRpcError) -> None:
        """Raise what the end of the stream means: `BrokenError`, or an error for the caller."""
        await self.judge(error.code(), error.details() or "")

    async def judge(self, code: grpc.StatusCode, text: str) -> None:
        if text in errors.STALE_TOKEN_TEXTS and self._connection.login.possible:
            await self._connection.login.renew(self._metadata)
            raise BrokenError(text)
        meaning = errors.translate_text(code, text, self.endpoint.name)
        if isinstance(meaning, Refused | ConfigError):
            raise meaning
        raise BrokenError(text)

    def close(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


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
        self._stream: Stream | None = None
        self._pieces: list[mvcc_pb2.Event] = []
        self._failures = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchBatch:
        """Return the next whole revisions; cancelling it loses nothing."""
        while True:
            try:
                if self._stream is None:
                    await self._open()
                if (batch := await self._next()) is not None:
                    self._seen = batch.revision
                    self._failures = 0
                    self._open_after = False
                    return batch
            except BrokenError:
                if self._stream is not None:
                    self._connection.blame(self._stream.endpoint)
                self._close()
                self._failures += 1
                await self._connection.timing.sleep(self._connection.timing.pause_s(self._failures))
            except ClusterReplaced:
                self._close()
                raise

    async def _open(self) -> None:
        connection = self._connection
        try:
            endpoint = await connection.ready_endpoint(connection.timing.open_s)
        except Unavailable as error:
            if connection.closed:
                raise
            raise BrokenError(error.message) from error
        self._stream = Stream(connection, endpoint)
        await self._stream.create(
            watch_pb2.WatchCreateRequest(
                key=self._key,
                range_end=self._end,
                start_revision=self._seen + 1 if self._open_after else max(1, self._seen),
                progress_notify=True,
                fragment=True,
            )
        )

    async def _next(self) -> WatchBatch | None:
        """Return the batch that the next answer completes, if it completes one."""
        assert self._stream is not None
        answer = await self._stream.receive()
        if answer.canceled:
            await self._canceled(answer)
        if answer.created:
            return None
        if answer.fragment:
            self._pieces.extend(answer.events)
            return None
        if not answer.events and not self._pieces:
            return self._progress(answer.header.revision)
        pieces, self._pieces = self._pieces, []
        pieces.extend(answer.events)
        events: tuple[Event, ...] = codec.decode_events(pieces, self._seen)
        return WatchBatch(revision=events[-1].kv.mod_revision, events=events) if events else None

    def _progress(self, revision: int) -> WatchBatch | None:
        if not self._trust_progress or revision < self._seen:
            return None
        return WatchBatch(revision=revision)

    async def _canceled(self, answer: watch_pb2.WatchResponse) -> None:
        assert self._stream is not None
        reason, stream = answer.cancel_reason, self._stream
        if answer.compact_revision == self._seen + 1 and not self._open_after:
            # what was asked for is there; only the revision before it, asked for to be heard, is not
            self._open_after = True
            raise BrokenError("one revision before the oldest left")
        if answer.compact_revision:
            self._close()
            raise Compacted(
                f"etcd {stream.endpoint.name}: revision {self._seen + 1} was compacted, "
                f"{answer.compact_revision} is the oldest left",
                compact_revision=answer.compact_revision,
            )
        await stream.judge(grpc.StatusCode.UNKNOWN, reason)

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        self._pieces = []
        if stream is not None:
            stream.close()
