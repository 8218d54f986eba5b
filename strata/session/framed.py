"""Length-prefixed protobuf over a Unix socket as a link (`strata.session.link.Link`), with the standard library only.

A frame is the length of the message in four bytes, big-endian, followed by the serialized message. The highest
bit of the length marks the last frame of a side. The last frame contains the `Error` with which the stream
ends, or nothing.

1. The accepting side first sends 16 random bytes, and the dialling side returns them. So the accepting side
   knows that the process whose credentials it looked up still has the socket open.
2. Neither side waits for the other. Messages that the socket does not take stay in an outbox, where a message may
   replace an older one of its kind (`newest`). A full outbox ends the link.
3. A side that ends the link sends its last frame, reads on until the other side has closed, and closes after
   `FLUSH_S` at the latest. Closing a socket with unread data would make the other side lose the last frame.
4. A forked child closes its copies of its parent's sockets, and sends nothing on them: so the parent's exit
   ends the parent's links.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from typing import Final, Generic, TypeVar, cast
from weakref import WeakSet

from google.protobuf.message import DecodeError, Message

from strata.errors import (
    ConfigError,
    InvalidArgument,
    QuotaExceeded,
    StrataError,
    TransportBroken,
    Unavailable,
)
from strata.session.link import MAX_MESSAGE_BYTES
from strata.v1.common_pb2 import Error
from strata.v1.session_pb2 import Down, Up
from strata.wire.errors import pack, unpack

In = TypeVar("In", bound=Message)
Out = TypeVar("Out", bound=Message)

OUTBOX_LIMIT: Final = 4096
OUTBOX_BYTES: Final = 64 << 20
"""The most messages, and the most bytes, that may wait for the other side: 128 rounds of a barrier with the
largest payloads."""
INBOX_BYTES: Final = 1 << 20
"""Bytes that may wait for this side's reader; with more, nothing is read from the socket."""
BUFFER_BYTES: Final = 64 << 10
FLUSH_S: Final = 1.0
"""Seconds an ending link gives a silent other side to take the sent messages."""
NONCE_BYTES: Final = 16

_LENGTH: Final = struct.Struct(">I")
_LAST: Final = 1 << 31


def newest_up(message: Up) -> Hashable:
    """Return the kind of a rank's message if only the newest message of that kind counts, else None."""
    kind = message.WhichOneof("message")
    if kind == "progress" and not (message.progress.evidence or message.progress.devices):
        return kind
    return kind if kind == "tick" else None


def newest_down(message: Down) -> Hashable:
    """Return the kind of an agent's message if only the newest message of that kind counts, else None."""
    kind = message.WhichOneof("message")
    return kind if kind in {"tick", "world"} else None


class FramedLink(asyncio.BufferedProtocol, Generic[In, Out]):
    """One end of a link over a stream socket; both asyncio's protocol and our `Link`.

    `target` names the other side in the errors of the end that dialled; the end that accepted has no `target`.
    `newest` returns the kind of a message that replaces an unsent one of the same kind. `opened` is called once the
    socket is connected.
    """

    def __init__(
        self,
        receives: type[In],
        newest: Callable[[Out], Hashable],
        *,
        target: str = "",
        opened: Callable[[FramedLink[In, Out]], None] | None = None,
    ) -> None:
        self._receives = receives
        self._newest = newest
        self._target = target
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self._process = _process
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._filled = 0
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self._outbox: dict[Hashable, bytes] = {}
        self._outbox_bytes = 0
        self._flushing = self._full = self._reading_paused = False
        self._closed = self._over = False
        self._error: StrataError | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self.transport: asyncio.Transport

    # -- the Link protocol

    async def recv(self) -> In | None:
        frame = await self.take()
        if frame is None:
            return None
        try:
            return self._receives.FromString(frame)
        except DecodeError:
            self.close(InvalidArgument(f"a frame of {len(frame)} bytes is no {self._receives.__name__}"))
            self._raise_end()
            return None

    def send(self, message: Out) -> None:
        frame = message.SerializeToString()
        if len(frame) > MAX_MESSAGE_BYTES:
            self.close(QuotaExceeded(f"a message of {len(frame)} bytes; {MAX_MESSAGE_BYTES} at most"))
        else:
            self.put(frame, self._newest(message))

    def close(self, error: StrataError | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._error = self._error or error
        self._inbox.clear()
        self._filled = 0
        if not self._over:
            self._put(_LAST, pack(error).SerializeToString() if error is not None else b"")
            self._loop.call_later(FLUSH_S, self.transport.abort)
            self.transport.resume_reading()  # to notice that the other side ended; no effect if reading is not paused
        self._rouse()

    def check(self) -> None:
        pass  # the two sides trust each other to read

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def backlog(self) -> int:
        return len(self._outbox)

    # -- frames

    async def take(self) -> bytes | None:
        """Return the next frame, undecoded; otherwise like `recv`."""
        while not self._inbox or self._closed:
            if self._closed or self._over:
                self._raise_end()
                return None
            self._wake = self._loop.create_future()
            await self._wake
        frame = self._inbox.popleft()
        self._inbox_bytes -= len(frame)
        if self._reading_paused and self._inbox_bytes < INBOX_BYTES:
            self._reading_paused = False
            self.transport.resume_reading()
        return frame

    def put(self, frame: bytes, kind: Hashable = None) -> None:
        """Queue a frame; never wait. A frame with a kind replaces an unsent frame of the same kind."""
        if self._closed or self._over:
            return
        if kind is not None and (older := self._outbox.pop(kind, None)) is not None:
            self._outbox_bytes -= len(older)
        if len(self._outbox) >= OUTBOX_LIMIT or self._outbox_bytes + len(frame) > OUTBOX_BYTES:
            self.close(Unavailable("the other side reads too slowly", hint="reconnect and resync"))
        else:
            self._put(0, frame, kind)

    def _put(self, mark: int, frame: bytes, kind: Hashable = None) -> None:
        if self._process is not _process:
            raise ConfigError(
                f"process {os.getpid()} was forked from the process that opened this connection, and cannot use it"
            )
        whole = _LENGTH.pack(mark | len(frame)) + frame
        self._outbox[kind if kind is not None else object()] = whole
        self._outbox_bytes += len(whole)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write all unsent frames with one call; do nothing while the socket has not yet taken earlier frames."""
        self._flushing = False
        if self._full or self._over or not self._outbox:
            return
        batch = b"".join(self._outbox.values())
        self._outbox.clear()
        self._outbox_bytes = 0
        self.transport.write(batch)
        if self._closed:
            self.transport.write_eof()

    def _raise_end(self) -> None:
        """Raise the error that ended the link, if there is one and this is the end that dialled."""
        if self._target and self._error is not None:
            raise self._error

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def wait_closed(self) -> None:
        """Return once the socket is closed, at most `FLUSH_S` after `close`."""
        await asyncio.wait((self._lost,))

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass of it
        if self._opened is not None:
            self._opened(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, count: int) -> None:
        if self._closed:
            return  # the reader has ended
        self._filled += count
        start, needed = 0, _LENGTH.size
        while self._filled - start >= needed:
            (head,) = _LENGTH.unpack_from(self._view, start)
            if (size := head & ~_LAST) > MAX_MESSAGE_BYTES:
                self.close(InvalidArgument(f"a frame of {size} bytes; {MAX_MESSAGE_BYTES} at most"))
                return
            needed = _LENGTH.size + size
            if self._filled - start >= needed:
                self._received(head, bytes(self._view[start + _LENGTH.size : start + needed]))
                start, needed = start + needed, _LENGTH.size
        self._keep(start, needed)

    def _keep(self, start: int, needed: int) -> None:
        """Move an incomplete frame of `needed` bytes to the front of a buffer that can hold all of it."""
        rest = self._filled - start
        if needed > len(self._view) or (rest < BUFFER_BYTES < len(self._view) and needed <= BUFFER_BYTES):
            old, self._view = self._view, memoryview(bytearray(max(needed, BUFFER_BYTES)))
            self._view[:rest] = old[start : self._filled]
        elif start and rest:
            self._view[:rest] = self._view[start : self._filled]
        self._filled = rest

    def _received(self, head: int, frame: bytes) -> None:
        if self._closed or self._over:
            return
        if head & _LAST:
            self._end(_end_error(frame))
            return
        self._inbox.append(frame)
        self._inbox_bytes += len(frame)
        if self._inbox_bytes >= INBOX_BYTES and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        self._rouse()

    def _end(self, error: StrataError | None) -> None:
        """Record that the other side sends no more; this side then has nothing to send either."""
        if not self._over:
            self._over = True
            self._error = self._error or error
            self._rouse()
        self.transport.abort()

    def eof_received(self) -> bool:
        self._end(TransportBroken(f"{self._target} ended the connection"))
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        as_agreed, self._over = self._over, True
        if not (self._closed or as_agreed):
            self._error = self._error or TransportBroken(f"the connection to {self._target} was lost")
        self._outbox.clear()
        self._rouse()
        if not self._lost.done():
            self._lost.set_result(None)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._flush()


async def challenged(link: FramedLink[Up, Down]) -> bool:
    """Return whether the process that dialled still has its socket open; takes one round trip."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    link.put(nonce)
    return await link.take() == nonce


def connected(path: str) -> socket.socket:
    """Return a socket connected to the Unix socket `path`; raise `OSError` if that fails.

    A child forked meanwhile closes its copy.
    """
    with _opening:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        _sockets.add(sock)
    try:
        sock.connect(path)  # never waits: asyncio would take a full backlog for a connection
    except OSError:
        sock.close()
        raise
    return sock


def paired() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets; a child forked meanwhile closes its copies of both."""
    with _opening:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        _sockets.update((ours, theirs))
    ours.setblocking(False)  # as asyncio requires
    return ours, theirs


@asynccontextmanager
async def dialled(
    sock: socket.socket, target: str, *, challenged: bool = True
) -> AsyncIterator[FramedLink[Down, Up]]:
    """Open a link over a connected socket; at the end of the context the link is flushed, then closed.

    `target` names the other side in errors. If the other side refuses with an error, that error is raised. Pass
    `challenged=False` for one end of a socket pair: the other side then sends no nonce.
    """
    _transport, link = await asyncio.get_running_loop().create_unix_connection(
        lambda: FramedLink[Down, Up](Down, newest_up, target=target), sock=sock
    )
    try:
        if challenged:
            nonce = await link.take()
            if nonce is None or len(nonce) != NONCE_BYTES:
                raise Unavailable(f"{target} did not begin with a nonce")
            link.put(nonce)
        yield link
    finally:
        link.close()
        await link.wait_closed()


def _end_error(frame: bytes) -> StrataError | None:
    try:
        return unpack(Error.FromString(frame)) if frame else None
    except DecodeError:
        return InvalidArgument(f"a last frame of {len(frame)} bytes is no Error")


# -- forks

_sockets: WeakSet[socket.socket] = WeakSet()
_opening = threading.Lock()
_process = object()
"""A new object in each forked process, so that a link recognizes its own process without a system call per frame."""


def _after_in_child() -> None:
    global _process  # noqa: PLW0603  # a fact about the process
    _process = object()
    try:
        for sock in _sockets:
            with suppress(OSError):  # the program may have closed the socket by its descriptor
                os.close(
                    sock.detach()
                )  # not sock.close(): it waits while an event loop (uvloop) still uses the socket
    finally:
        _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_after_in_child)
