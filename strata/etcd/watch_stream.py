"""One attempt at a watch: a stream to one endpoint, from its opening to its break.

Silence is a break. An idle stream requests its progress every 5 s, and breaks after 15 s without an answer. If
calls to the stream's member fail meanwhile, the stream requests its progress immediately and breaks after 3 s.
So the first call that meets a frozen member reveals it, and the watches at that member break too.

Time counts only while a caller waits for an answer: a slow reader does not make etcd silent.
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

_PROGRESS_REQUEST: Final = watch_pb2.WatchRequest(progress_request=watch_pb2.WatchProgressRequest())


class BrokenError(Exception):
    """This stream is broken; another one may work. The error never leaves this package."""

    def __init__(self, why: str, *, blame: bool = True) -> None:
        """`blame` is False if the endpoint is not at fault."""
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
        self._received_at = self._requested_at = self._timing.now()
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
        """Return the next answer; `BrokenError` if there will be none. May be cancelled."""
        # Cancelling a read cancels the whole call, so a task reads, and a caller can stop waiting for that task.
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._received_at = self._timing.now()
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
                self._received_at = self._timing.now()
                try:
                    self._connection.guard.admit(answer.header, self._floor, self.endpoint.name)
                except Unavailable as error:
                    raise BrokenError(error.message) from error
                return answer
        raise BrokenError("etcd ended the stream")

    async def judge(self, code: grpc.StatusCode, text: str) -> None:
        """Raise the meaning of the stream's end: `BrokenError`, or an error for the caller."""
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
            reading.exception()  # retrieve the error of a read that no caller will await

    async def _tick(self) -> float:
        """Request progress when it is due, and return how long to wait for an answer."""
        timing, now = self._timing, self._timing.now()
        blamed_at = self.endpoint.health.blamed_at
        blamed = blamed_at > self._received_at
        if now - self._received_at >= timing.silence_s or (
            blamed and self._requested_at >= blamed_at and now - self._requested_at >= timing.open_s
        ):
            raise BrokenError("silent")
        if not self._confirmed:
            return timing.open_s
        if now - max(self._requested_at, self._received_at) >= timing.progress_s or (
            blamed and self._requested_at < blamed_at
        ):
            self._requested_at = now
            await self._write(_PROGRESS_REQUEST)
        return min(1.0, timing.progress_s, timing.open_s)

    async def _write(self, request: watch_pb2.WatchRequest) -> None:
        try:
            await self._call.write(request)
        except (AioRpcError, asyncio.InvalidStateError) as error:
            # a pending read will raise the reason
            if self._reading is None:
                raise BrokenError("the stream did not open") from error
