"""gRPC streams as links (`strata.session.link.Link`): the only place where a stream meets grpc.

Both ends are alike: one writer task empties a bounded outbox; reading goes straight to grpc, with
no queue in between. Neither end lets the session's logic be cancelled by the transport: a broken
stream is an end of `recv`.

What grpc.aio does, tried with 1.85: when the client goes, the server's pending read returns EOF
and the handler's task is cancelled; when a handler returns, its pending read raises.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from strata.errors import StrataError, TransportBroken, Unavailable
from strata.observe import get_logger
from strata.wire import status

log = get_logger()

In = TypeVar("In")
Out = TypeVar("Out", bound=Message)
M = TypeVar("M", bound=Message)

OUTBOX_LIMIT: Final = 4096
"""Messages that one end may owe the other."""
OUTBOX_BYTES: Final = 64 << 20
"""Bytes that one end may owe the other, besides the first `OUTBOX_FREE` messages: to count costs as
much as to send, and whoever reads is never that far behind."""
OUTBOX_FREE: Final = 64

FLUSH_S: Final = 1.0
"""How long an ending stream waits for a silent other side to take what was sent."""

Unread = Callable[[], AbstractContextManager[Any]]
"""Takes note of an ending stream whose last message is not read, for as long as that is so."""
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task that outlives the caller: `TaskGroup.create_task` of whoever owns it."""


class _Outbox(Generic[M]):
    """A bounded queue between senders that never wait and one writer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: deque[tuple[M, int]] = deque()
        self._bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: M) -> bool:
        """Queue `message`; False when there is no room."""
        size = 0
        if len(self._queue) >= OUTBOX_FREE:
            size = message.ByteSize()
            if len(self._queue) >= self._limit or self._bytes + size > OUTBOX_BYTES:
                return False
        self._bytes += size
        self._queue.append((message, size))
        self._rouse()
        return True

    def drop(self) -> None:
        """Forget what the other side did not take."""
        self._queue.clear()
        self._bytes = 0

    def close(self) -> None:
        """Let the writer end once it has emptied the queue."""
        self.closed = True
        self._rouse()

    async def empty_into(self, write: Callable[[M], Awaitable[None]]) -> None:
        """Write every message in order, until closed and empty."""
        while True:
            while self._queue:
                message, size = self._queue.popleft()
                self._bytes -= size
                await write(message)
            if self.closed:
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _End(Generic[Out]):
    """What both ends share: the outbox, its writer and how the stream ends."""

    def __init__(self, write: Callable[[Out], Awaitable[None]], limit: int) -> None:
        self._write = write
        self._outbox: _Outbox[Out] = _Outbox(limit)
        self.ending = asyncio.Event()
        self.error: StrataError | None = None
        self.broke = False
        """Whether a write failed: then what reading says of it is the better reason."""

    @property
    def backlog(self) -> int:
        return len(self._outbox)

    @property
    def closed(self) -> bool:
        """Whether the stream has ended or is ending."""
        return self.ending.is_set()

    def send(self, message: Out) -> None:
        if not self.ending.is_set() and not self._outbox.put(message):
            self.close(Unavailable("the other side reads too slowly", hint="reconnect and resync"))

    def close(self, error: StrataError | None = None) -> None:
        if not self.ending.is_set():
            self.error = error
            self._outbox.close()
            self.ending.set()

    def drop(self) -> None:
        """Forget what was not written, after the end."""
        self._outbox.drop()

    async def pump(self) -> None:
        """Write what is sent until the stream ends."""
        try:
            await self._outbox.empty_into(self._write)
        except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError):
            # the transport is gone; the reader sees it too and says why
            self.broke = True
            self.close(Unavailable("the stream broke"))
        except Exception:
            # A message that cannot be written is this stream's end, not that of its owner's others.
            log.exception("message_not_written")
            self.close(StrataError("internal error", hint="the log has the details"))


class ServerContext(status.Aborts, Protocol):
    """The part of grpc.aio's servicer context that a stream needs."""

    async def read(self) -> Any:
        """Return the next message or EOF."""
        ...

    async def write(self, message: Any) -> None:
        """Write one message."""
        ...


class ServerStream(_End[Out], Generic[In, Out]):
    """The accepting end."""

    def __init__(self, context: ServerContext, *, outbox_limit: int = OUTBOX_LIMIT) -> None:
        super().__init__(context.write, outbox_limit)
        self._context = context

    async def recv(self) -> In | None:
        if self.ending.is_set():
            return None
        try:
            message: In = await self._context.read()
        except (grpc.aio.BaseError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelling():
                raise
            return None  # the handler has returned: the stream ended from our side
        if message is grpc.aio.EOF or self.ending.is_set():
            return None
        return message


async def serve_stream(
    context: ServerContext,
    serve: Callable[[ServerStream[In, Out]], Coroutine[Any, Any, None]],
    spawn: Spawn,
    *,
    unread: Unread = nullcontext,
) -> None:
    """Run `serve` on the stream of `context`; return when the stream has ended.

    A servicer's method is this call. `serve` runs in a task of `spawn`, so that a vanished client
    ends its `recv` instead of cancelling it in the middle of a write; it owns the stream and
    closes it by returning.

    gRPC takes no status while a message waits for a window. If the other side opens none, this waits as well, in
    the block of `unread`, until it does or the connection ends: the call would stay otherwise.
    """
    link: ServerStream[In, Out] = ServerStream(context)

    async def logic() -> None:
        try:
            await serve(link)
        except Exception:
            # A bug met by one stream is that stream's end, not that of everybody served here.
            log.exception("stream_failed")
            link.close(StrataError("internal error", hint="the server's log has the details"))
        finally:
            link.close()

    try:
        _session = spawn(logic())
        writer = spawn(link.pump())
    except StrataError as error:
        await status.abort(context, error)
    await link.ending.wait()
    try:
        await asyncio.wait([writer], timeout=FLUSH_S)
        link.drop()
        if not writer.done():
            with unread():
                await asyncio.wait([writer])
    finally:
        writer.cancel()
    if link.error is not None:
        await status.abort(context, link.error)


class ClientCall(Protocol):
    """The part of grpc.aio's stream-stream call that a stream needs."""

    async def read(self) -> Any:
        """Return the next message or EOF."""
        ...

    async def write(self, request: Any) -> None:
        """Write one message."""
        ...

    async def done_writing(self) -> None:
        """Say that no more is written."""
        ...

    async def code(self) -> grpc.StatusCode:
        """Return how the call ended."""
        ...

    def cancel(self) -> bool:
        """End the call at once."""
        ...


class ClientStream(_End[Out], Generic[In, Out]):
    """The dialling end."""

    def __init__(self, call: ClientCall, target: str, *, outbox_limit: int = OUTBOX_LIMIT) -> None:
        super().__init__(call.write, outbox_limit)
        self._call = call
        self._target = target

    async def recv(self) -> In | None:
        try:
            with status.translated(self._target), _breaks_told(self._target):
                message: Any = await self._call.read()
        except asyncio.CancelledError:
            if _is_cancelling() or not self.ending.is_set():
                raise
            message = grpc.aio.EOF  # `close` ended the call
        except StrataError:
            if not self.ending.is_set() or self.broke:
                raise
            message = grpc.aio.EOF
        if message is grpc.aio.EOF:
            if self.error is not None and not self.broke:
                raise self.error
            return None  # also where a write met the end that reading says was a good one
        received: In = message
        return received


@asynccontextmanager
async def dialled(call: ClientCall, target: str) -> AsyncIterator[ClientStream[Any, Any]]:
    """Have the stream of `call` as a link; at the end it is flushed, then ended.

    `target` is the address that errors name.
    """
    link: ClientStream[Any, Any] = ClientStream(call, target)
    writer = asyncio.create_task(link.pump(), name=f"writer to {target}")
    ender = asyncio.create_task(_end(link, call, writer), name=f"end of the stream to {target}")
    try:
        yield link
    finally:
        link.close()
        await ender


async def _end(link: ClientStream[Any, Any], call: ClientCall, writer: asyncio.Task[None]) -> None:
    await link.ending.wait()
    try:
        async with asyncio.timeout(FLUSH_S):
            await asyncio.wait([writer])
            await call.done_writing()
            await call.code()
    except (TimeoutError, grpc.aio.BaseError):
        pass  # it is ended below, with whatever is left unsent
    writer.cancel()
    call.cancel()


@contextmanager
def _breaks_told(target: str) -> Iterator[None]:
    """Raise `TransportBroken` for an established connection that was ended or reset."""
    try:
        yield
    except grpc.RpcError as error:
        if not status.is_broken_transport(error):
            raise
        raise TransportBroken(str(status.from_rpc(error, target).message)) from error


def _is_cancelling() -> bool:
    """Tell whether somebody cancels the running task, or the library only says so."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
