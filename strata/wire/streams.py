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
from contextlib import asynccontextmanager, contextmanager
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
"""Bytes that the end that dialled may owe the other."""
SERVED_BYTES: Final = 16 << 20
"""Bytes that the accepting end may owe: 32 rounds of a barrier with the largest payloads."""
MESSAGE_BYTES: Final = 1 << 10
"""What a message counts besides its own size: the object that holds it, and its place in the queue."""

FLUSH_S: Final = 1.0
"""How long an ending stream waits for a silent other side to take what was sent."""

Paid = Callable[[], None]
"""Takes note that a message is owed no more."""


class Account(Protocol):
    """What the other side is owed, over all that it has open."""

    def check(self) -> None:
        """Return if more may be owed; else `QuotaExceeded`."""
        ...

    def owe(self, size_bytes: int) -> Paid:
        """Count a message, from now until what this returns is called."""
        ...


class Uncounted:
    """The account of somebody who is trusted to read."""

    def check(self) -> None:
        pass

    def owe(self, size_bytes: int) -> Paid:  # the protocol's
        return _nothing


def _nothing() -> None:
    pass


UNCOUNTED: Final = Uncounted()
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task that outlives the caller: `TaskGroup.create_task` of whoever owns it."""


class _Outbox(Generic[M]):
    """A bounded queue between senders that never wait and one writer.

    A message is owed from when it is put until its write has returned: then its last byte fitted the window.
    """

    def __init__(self, limit: int, limit_bytes: int, account: Account) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._account = account
        self._queue: deque[tuple[M, int, Paid]] = deque()
        self._bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: M) -> bool:
        """Queue `message`; False when there is no room."""
        size = message.ByteSize() + MESSAGE_BYTES
        if len(self._queue) >= self._limit or self._bytes + size > self._limit_bytes:
            return False
        self._bytes += size
        self._queue.append((message, size, self._account.owe(size)))
        self._rouse()
        return True

    def drop(self) -> None:
        """Forget what the other side did not take."""
        for _message, _size, paid in self._queue:
            paid()
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
                message, size, paid = self._queue.popleft()
                self._bytes -= size
                try:
                    await write(message)
                finally:
                    paid()
            if self.closed:
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _End(Generic[Out]):
    """What both ends share: the outbox, its writer and how the stream ends."""

    def __init__(self, write: Callable[[Out], Awaitable[None]], outbox: _Outbox[Out]) -> None:
        self._write = write
        self._outbox = outbox
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
        finally:
            self.drop()


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

    def __init__(self, context: ServerContext, account: Account = UNCOUNTED) -> None:
        super().__init__(context.write, _Outbox(OUTBOX_LIMIT, SERVED_BYTES, account))
        self._context = context
        self._account = account

    def check(self) -> None:
        self._account.check()

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
    account: Account = UNCOUNTED,
) -> None:
    """Run `serve` on the stream of `context`; return when the stream has ended.

    A servicer's method is this call. `serve` runs in a task of `spawn`, so that a vanished client
    ends its `recv` instead of cancelling it in the middle of a write; it owns the stream and
    closes it by returning.

    What is sent counts in `account` until it is written. gRPC takes no status while a message waits for a window. If
    the other side opens none, this waits as well, and the message stays owed, until the connection ends: the call
    would stay otherwise.
    """
    link: ServerStream[In, Out] = ServerStream(context, account)

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

    def __init__(self, call: ClientCall, target: str) -> None:
        super().__init__(call.write, _Outbox(OUTBOX_LIMIT, OUTBOX_BYTES, UNCOUNTED))
        self._call = call
        self._target = target

    def check(self) -> None:
        pass  # nobody who dialled is asked

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
