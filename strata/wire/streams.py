"""gRPC streams as links (`strata.session.link.Link`): the only place where a stream meets grpc.

Both ends of a stream work in the same way: one writer task empties a bounded outbox, and a reader reads directly from
grpc, with no queue in between. The transport never cancels the session's logic, at either end: a broken stream ends
`recv`.

grpc.aio's behaviour, tested with 1.85: when the client disconnects, the server's pending read returns EOF and
the handler's task is cancelled; when a handler returns, its pending read raises.
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
"""The most messages that may wait for the other side, at either end."""
OUTBOX_BYTES: Final = 64 << 20
"""The most bytes that may wait at the dialling end."""
SERVED_BYTES: Final = 16 << 20
"""The most bytes that may wait at the accepting end: 32 rounds of a barrier with the largest payloads."""
MESSAGE_BYTES: Final = 1 << 10
"""Bytes counted for a message besides its own size: for its object and its place in the queue."""

FLUSH_S: Final = 1.0
"""Seconds an ending stream gives a silent other side to take the sent messages."""

Paid = Callable[[], None]
"""Records that a message no longer waits for the other side."""


class Account(Protocol):
    """The bytes that wait for one caller, over all its open streams."""

    def check(self) -> None:
        """Raise `QuotaExceeded` if no more bytes may wait for the caller."""
        ...

    def owe(self, size_bytes: int) -> Paid:
        """Count a message until the returned function is called."""
        ...


class Uncounted:
    """The account of a caller that is trusted to read."""

    def check(self) -> None:
        pass

    def owe(self, size_bytes: int) -> Paid:  # named by the protocol
        return _nothing


def _nothing() -> None:
    pass


UNCOUNTED: Final = Uncounted()
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task that outlives the caller: `TaskGroup.create_task` of the task's owner."""


class _Outbox(Generic[M]):
    """A bounded queue between senders that never wait and one writer.

    A message counts from `put` until its write has returned: by then its last byte has fitted into the
    flow-control window.
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
        """Queue `message`; return False if the queue is full."""
        size = message.ByteSize() + MESSAGE_BYTES
        if len(self._queue) >= self._limit or self._bytes + size > self._limit_bytes:
            return False
        self._bytes += size
        self._queue.append((message, size, self._account.owe(size)))
        self._rouse()
        return True

    def drop(self) -> None:
        """Drop the messages that the other side did not take."""
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
    """The part that both ends share: the outbox, its writer, and the stream's end."""

    def __init__(self, write: Callable[[Out], Awaitable[None]], outbox: _Outbox[Out]) -> None:
        self._write = write
        self._outbox = outbox
        self.ending = asyncio.Event()
        self.error: StrataError | None = None
        self.broke = False
        """Whether a write failed: the reader's error is then the better reason."""

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
        """Drop the messages that were not written, after the end."""
        self._outbox.drop()

    async def pump(self) -> None:
        """Write sent messages until the stream ends."""
        try:
            await self._outbox.empty_into(self._write)
        except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError):
            # the transport is lost; the reader notices it too and raises the reason
            self.broke = True
            self.close(Unavailable("the stream broke"))
        except Exception:
            # a message that cannot be written ends this stream, not its owner's other streams
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
            return None  # the handler has returned: this side ended the stream
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

    A servicer's method consists of this call. `serve` runs in a task of `spawn`, so that a vanished client ends
    its `recv` instead of cancelling it in the middle of a write. `serve` owns the stream, and closes it by
    returning.

    Messages count in `account` until they are written. gRPC accepts no status while a message waits for the
    flow-control window. If the other side never opens the window, this call waits until the connection ends.
    The message stays counted until then: otherwise the gRPC call would stay open and not count.
    """
    link: ServerStream[In, Out] = ServerStream(context, account)

    async def logic() -> None:
        try:
            await serve(link)
        except Exception:
            # a bug that one stream triggers ends this stream, but no other stream of this server
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
        """End the writing direction."""
        ...

    async def code(self) -> grpc.StatusCode:
        """Return the status of the ended call."""
        ...

    def cancel(self) -> bool:
        """End the call immediately."""
        ...


class ClientStream(_End[Out], Generic[In, Out]):
    """The dialling end."""

    def __init__(self, call: ClientCall, target: str) -> None:
        super().__init__(call.write, _Outbox(OUTBOX_LIMIT, OUTBOX_BYTES, UNCOUNTED))
        self._call = call
        self._target = target

    def check(self) -> None:
        pass  # no quota applies to the dialling end

    async def recv(self) -> In | None:
        try:
            with status.translated(self._target), _raise_transport_broken(self._target):
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
            return None  # also if a write failed because the stream had already ended normally
        received: In = message
        return received


@asynccontextmanager
async def dialled(call: ClientCall, target: str) -> AsyncIterator[ClientStream[Any, Any]]:
    """Open the stream of `call` as a link; at the end of the context it is flushed, then ended.

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
        pass  # the call is ended below, with the unsent messages dropped
    writer.cancel()
    call.cancel()


@contextmanager
def _raise_transport_broken(target: str) -> Iterator[None]:
    """Raise `TransportBroken` if an established connection was ended or reset."""
    try:
        yield
    except grpc.RpcError as error:
        if not status.is_broken_transport(error):
            raise
        raise TransportBroken(str(status.from_rpc(error, target).message)) from error


def _is_cancelling() -> bool:
    """Return whether the running task is really being cancelled; grpc.aio also raises `CancelledError` by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
