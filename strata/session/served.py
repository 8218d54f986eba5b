"""The serving side of one session, shared by replicas (for members) and agents (for ranks).

Replica and agent differ in their `Handler`. The rules for both, in the order of a session's life:

1. The first message is a Hello, within a time limit. `accept` answers it with a Welcome, or refuses. If the
   other side disconnects before the answer, the Hello is dropped: another replica may have welcomed the other
   side by now, and its session must not be taken from that replica.
2. Messages are dispatched in the order they came. Handlers that must not wait are plain methods. Calls and
   exits run in tasks of their own, so that a slow call delays no arrival. Each gets exactly one Reply; replies
   may overtake each other.
3. A Tick is sent every second. It shows that this event loop runs; it shows nothing about the transport.
4. The session ends once. `Handler.ended` is called immediately with the way it ended; calls under way still finish.

A Leave waits until the calls before it have finished: the exit of a rank is recorded before its member has
left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

from strata.errors import InvalidArgument, QuotaExceeded, StrataError, Unavailable
from strata.observe import get_logger
from strata.session.link import MAX_MESSAGE_BYTES, Link
from strata.v1 import barriers_pb2, session_pb2
from strata.wire.errors import pack

log = get_logger()


class End(Enum):
    """How a session ended."""

    LEFT = "left"
    """The other side left permanently, and the leave is recorded."""
    BROKEN = "broken"
    """The transport ended without a Leave: a crash, a freeze, or a mere reconnect."""
    CLOSED = "closed"
    """This side ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the resources of one session."""

    hello_s: float = 10.0
    tick_s: float = 1.0
    calls: int = 256
    """The most calls and exits under way at the same time."""
    early: int = 64
    """The most messages read while a Hello is being answered; a Strata client sends only ticks in that time."""
    early_bytes: int = 64 << 10
    """The most bytes read while a Hello is being answered. Further bytes, and the end of the stream, wait in the
    transport.
    """


class Session:
    """The handle of a session's owner: sends messages and ends the session."""

    def __init__(self, link: Link[session_pb2.Up, session_pb2.Down]) -> None:
        self._link = link
        self.closed = False
        """Whether this side has ended the session."""
        self.now_s = asyncio.get_running_loop().time
        self.last_message_s = self.now_s()
        """When the other side last sent something, on the loop's clock."""

    def send(self, message: session_pb2.Down) -> None:
        """Queue one message; never wait."""
        self._link.send(message)

    def end(self, error: StrataError) -> None:
        """End the session permanently; the caller on the other side gets `error`."""
        self._link.send(session_pb2.Down(ended=session_pb2.Ended(error=pack(error))))
        self.close()

    def close(self, error: StrataError | None = None) -> None:
        """End the stream. After a retryable error, or none, the other side reconnects."""
        self.closed = True
        self._link.close(error)

    def check(self) -> None:
        """Raise `QuotaExceeded` if the other side must read earlier answers before it gets more."""
        self._link.check()

    @property
    def ended_here(self) -> bool:
        """Whether this side ended the stream, for example because the other side did not read."""
        return self._link.closed

    @property
    def backlog(self) -> int:
        """How many sent messages the other side has not read."""
        return self._link.backlog


class Handler(Protocol):
    """One side's reaction to the messages of one session."""

    def arrivals(self, arrivals: Sequence[barriers_pb2.Arrival]) -> None:
        """Record that ranks reached a barrier."""
        ...

    def progress(self, progress: session_pb2.Progress) -> None:
        """Record the progress that ranks report."""
        ...

    async def rank_exit(self, rank_exit: session_pb2.RankExit) -> session_pb2.Reply:
        """Record the end of a rank's process, and return the reply; `serve` sets the reply's id."""
        ...

    async def call(self, call: session_pb2.Call) -> session_pb2.Reply:
        """Answer a request; `serve` sets the reply's id."""
        ...

    async def leave(self, leave: session_pb2.Leave) -> None:
        """Record that the other side leaves permanently."""
        ...

    def tick(self, sequence: int) -> session_pb2.Tick:
        """Return the next tick."""
        ...

    def ended(self, end: End) -> None:
        """Record that the session is over. Called exactly once, in every case."""
        ...


_Answer = Callable[[], Awaitable[session_pb2.Reply]]

Accept = Callable[[session_pb2.Hello, Session], Coroutine[Any, Any, Handler]]
"""Answers a Hello: sends the Welcome and returns the handler, or raises the refusal."""


async def serve(
    link: Link[session_pb2.Up, session_pb2.Down], accept: Accept, *, limits: Limits | None = None
) -> None:
    """Serve one session from its Hello to its end."""
    limits = limits or Limits()
    session = Session(link)
    reader = _Reader(link)
    try:
        hello = await _first_hello(reader, limits.hello_s)
        handler = await _accept_or_disconnect(accept(hello, session), reader, limits)
    except StrataError as error:
        session.close(error)
        return
    except Exception:
        # a bug in one session ends this session, not the other sessions served here
        log.exception("session_failed")
        session.close(_internal())
        return
    await _Serving(reader, session, handler, limits).run()


class _Reader:
    """The messages of the other side, some of which may be read early.

    A read in progress is never cancelled: the end of the stream ends it.
    """

    def __init__(self, link: Link[session_pb2.Up, session_pb2.Down]) -> None:
        self._link = link
        self._early: deque[session_pb2.Up] = deque()
        self._reading: asyncio.Task[session_pb2.Up | None] | None = None

    async def recv(self) -> session_pb2.Up | None:
        """Return the next message; None once there are no more."""
        if self._early:
            return self._early.popleft()
        if self._reading is not None:
            reading, self._reading = self._reading, None
            return await reading
        return await self._link.recv()

    async def wait_disconnected(self, limits: Limits) -> None:
        """Return once the other side has disconnected; never return if the limits are reached first. Keep every
        message.
        """
        left_bytes = limits.early_bytes
        while len(self._early) < limits.early and left_bytes > 0:
            if self._reading is None:
                self._reading = asyncio.create_task(self._link.recv(), name="early messages")
            await asyncio.wait((self._reading,))  # cancelling this coroutine leaves the read running
            message = self._reading.result()
            if message is None:
                return
            self._reading = None
            self._early.append(message)
            left_bytes -= message.ByteSize()
        await asyncio.get_running_loop().create_future()


async def _accept_or_disconnect(
    answer: Coroutine[Any, Any, Handler], reader: _Reader, limits: Limits
) -> Handler:
    """Return the handler that answers the Hello; `Unavailable` if the other side disconnects before that."""
    answering = asyncio.create_task(answer)
    watching = asyncio.create_task(reader.wait_disconnected(limits))
    try:
        await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
        await _stop(answering, watching)
    except asyncio.CancelledError:
        await _stop(answering, watching)
        if not answering.cancelled() and answering.exception() is None:
            answering.result().ended(End.CLOSED)
        raise
    if answering.cancelled():
        if not watching.cancelled():
            watching.result()
        raise Unavailable("the other side disconnected before its Hello was answered", hint="")
    return answering.result()


async def _stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()  # no effect on a finished task
    await asyncio.wait(tasks)


async def _first_hello(reader: _Reader, limit_s: float) -> session_pb2.Hello:
    try:
        async with asyncio.timeout(limit_s):
            first = await reader.recv()
    except TimeoutError:
        raise Unavailable(f"no Hello came within {limit_s:g} s") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidArgument("a session begins with a Hello")
    return first.hello


class _Serving:
    """A session after its Welcome."""

    def __init__(
        self,
        reader: _Reader,
        session: Session,
        handler: Handler,
        limits: Limits,
    ) -> None:
        self._reader = reader
        self._session = session
        self._handler = handler
        self._limits = limits
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        end = End.CLOSED
        async with asyncio.TaskGroup() as tasks:
            ticker = tasks.create_task(self._tick())
            try:
                end = await self._read(tasks)
            except StrataError as error:
                self._session.close(error)
            except Exception:
                # as in `serve`: a bug ends this session and no other
                log.exception("session_failed")
                self._session.close(_internal())
            finally:
                ticker.cancel()
                self._handler.ended(end)

    async def _read(self, tasks: asyncio.TaskGroup) -> End:
        handler = self._handler
        while (up := await self._reader.recv()) is not None:
            self._session.last_message_s = self._session.now_s()
            match up.WhichOneof("message"):
                case "arrivals":
                    handler.arrivals(up.arrivals.arrivals)
                case "progress":
                    handler.progress(up.progress)
                case "call":
                    self._run(tasks, up.call.id, partial(self._call, up.call))
                case "rank_exit":
                    self._run(tasks, up.rank_exit.id, partial(handler.rank_exit, up.rank_exit))
                case "leave":
                    if self._calls:
                        await asyncio.wait(self._calls)
                    await handler.leave(up.leave)
                    self._session.close()
                    return End.LEFT
                case "hello":
                    raise InvalidArgument("a session has one Hello")
                case _:
                    pass  # a tick, or a message of a newer version
        return End.CLOSED if self._session.closed else End.BROKEN

    def _run(self, tasks: asyncio.TaskGroup, call_id: int, answer: _Answer) -> None:
        if len(self._calls) >= self._limits.calls:
            self._reply(
                call_id, _refused(QuotaExceeded(f"{self._limits.calls} calls of this session are under way"))
            )
            return
        task = tasks.create_task(self._answer(call_id, answer))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, call: session_pb2.Call) -> session_pb2.Reply:
        """Return the reply to a call; raise `QuotaExceeded` if the other side leaves too many answers unread."""
        self._session.check()
        reply = await self._handler.call(call)
        self._session.check()  # other calls may have been answered meanwhile
        return reply

    async def _answer(self, call_id: int, answer: _Answer) -> None:
        try:
            reply = await answer()
        except StrataError as error:
            reply = _refused(error)
        except Exception:
            # a bug in one call fails only that call; the session goes on
            log.exception("call_failed")
            reply = _refused(_internal())
        self._reply(call_id, reply)

    def _reply(self, call_id: int, reply: session_pb2.Reply) -> None:
        down = session_pb2.Down()
        down.reply.CopyFrom(reply)  # twice as fast as the constructor, which goes through bytes
        size = down.ByteSize()
        if size > MAX_MESSAGE_BYTES - 16:  # the id is added below
            why = f"the answer has {size} bytes, a message at most {MAX_MESSAGE_BYTES}"
            down = session_pb2.Down(reply=_refused(QuotaExceeded(why, hint="ask for less at once")))
        down.reply.id = call_id
        self._session.send(down)

    async def _tick(self) -> None:
        sequence = 0
        while True:
            await asyncio.sleep(self._limits.tick_s)
            sequence += 1
            if not self._session.backlog:  # a tick that waits behind other messages proves nothing
                self._session.send(session_pb2.Down(tick=self._handler.tick(sequence)))


def _refused(error: StrataError) -> session_pb2.Reply:
    return session_pb2.Reply(error=pack(error))


def _internal() -> StrataError:
    return StrataError("internal error", hint="the server's log has the details; please report it")
