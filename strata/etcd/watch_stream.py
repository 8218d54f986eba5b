"""One attempt at a watch: a stream to one endpoint, from its opening to its break.

Silence is a break: an idle stream asks for its progress every 5 s, and is given up after 15 s
without a word. When calls to its member fail meanwhile, it asks at once and gives it 3 s: a frozen
member is found by whatever call meets it first, and takes its watches with it.

Time counts only while somebody waits for an answer; a slow reader is not a silent etcd.
"""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
from grpc.aio import AioRpcError, StreamStreamCall

from strata.errors import ConfigError, Refused, Unavailable
from strata.etcd import errors
from strata.etcd.connection import Connection
from strata.etcd.endpoint import Endpoint
from strata.etcdapi import watch_pb2

WatchCall = StreamStreamCall[watch_pb2.WatchRequest, watch_pb2.WatchResponse]

_ASK: Final = watch_pb2.WatchRequest(progress_request=watch_pb2.WatchProgressRequest())


class BrokenError(Exception):
    """This stream is of no use any more; another may be. It never leaves this package."""

    def __init__(self, why: str, *, blame: bool = True) -> None:
        """`blame` False: the endpoint did nothing wrong."""
        super().__init__(why)
        self.blame = blame


class WatchStream:
    """A gRPC stream with exactly one watch on it."""

    def __init__(self, connection: Connection, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._connection = connection
        self._timing = connection.timing
        self._floor = connection.guard.floor
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
        if answer.canceled:
            await self.judge(grpc.StatusCode.UNKNOWN, errors.plain(answer.cancel_reason))
        if not answer.created:
            raise BrokenError("etcd sent something else before its confirmation")
        self._confirmed = True

    async def receive(self) -> watch_pb2.WatchResponse:
        """Return the next answer; `BrokenError` when there will be none. May be cancelled."""
        # Cancelling a read cancels the whole call; a task of its own lets the caller give up waiting.
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._heard_at = self._timing.now()
        while not self._reading.done():
            await asyncio.wait((self._reading,), timeout=await self._tick())
        reading, self._reading = self._reading, None
        try:
            answer = reading.result()
        except AioRpcError as error:
            await self.judge(error.code(), error.details() or "")
        except asyncio.CancelledError:
            raise BrokenError("the call was closed", blame=False) from None
        else:
            if isinstance(answer, watch_pb2.WatchResponse):
                self._heard_at = self._timing.now()
                try:
                    self._connection.guard.admit(answer.header, self._floor, self.endpoint.name)
                except Unavailable as error:
                    raise BrokenError(error.message) from error
                return answer
        raise BrokenError("etcd ended the stream")

    async def judge(self, code: grpc.StatusCode, text: str) -> None:
        """Raise what the end of the stream means: `BrokenError`, or an error for the caller."""
        if errors.is_stale_token_text(text) and self._connection.login.possible:
            await self._connection.login.renew(self._metadata)
            raise BrokenError(text, blame=False)
        meaning = errors.translate_text(code, text, self.endpoint.name)
        if isinstance(meaning, Refused | ConfigError):
            raise meaning
        raise BrokenError(text)

    def close(self) -> None:
        self._call.cancel()
        reading, self._reading = self._reading, None
        if reading is not None and not reading.cancel() and not reading.cancelled():
            reading.exception()  # it ended before anybody looked; nobody will

    async def _tick(self) -> float:
        """Ask for progress when it is time, and return how long to wait for an answer."""
        timing, now = self._timing, self._timing.now()
        blamed_at = self.endpoint.health.blamed_at
        suspected = blamed_at > self._heard_at
        if now - self._heard_at >= timing.silence_s or (
            suspected and self._asked_at >= blamed_at and now - self._asked_at >= timing.open_s
        ):
            raise BrokenError("silent")
        if not self._confirmed:
            return timing.open_s
        if now - max(self._asked_at, self._heard_at) >= timing.progress_s or (
            suspected and self._asked_at < blamed_at
        ):
            self._asked_at = now
            await self._write(_ASK)
        return min(1.0, timing.progress_s, timing.open_s)

    async def _write(self, request: watch_pb2.WatchRequest) -> None:
        try:
            await self._call.write(request)
        except (AioRpcError, asyncio.InvalidStateError) as error:
            # a read that waits will say why
            if self._reading is None:
                raise BrokenError("the stream did not open") from error
