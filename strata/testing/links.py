"""Links in memory: what `strata.wire.streams` is over gRPC, between two coroutines of one loop.

    board = Switchboard()
    board.listen("b", serve, tasks.create_task)      # serve(link) runs for each that dials
    async with board.dial("a", "b") as link: ...
    board.cut("a", "b")                              # every link between them breaks, none is made

What holds of the real ones holds here: order; the end that dialled learns of a break by
`Unavailable`, the other one by None; what was sent before a clean end arrives, what was on its way
at a break may not. Messages are copied, as a wire would.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import Message

from strata.errors import StrataError, Unavailable

Serve = Callable[["MemoryLink"], Coroutine[Any, Any, None]]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class MemoryLink:
    """One end of a link; made by `pair`. `stalled`: this end reads nothing, as if frozen."""

    def __init__(self, *, dialled: bool, delay_s: float, outbox_limit: int) -> None:
        self.other: MemoryLink = self
        self.closed = False
        self._dialled = dialled
        self._delay_s = delay_s
        self._limit = outbox_limit
        self._inbox: deque[Message] = deque()
        self._coming = 0
        self._way: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._over = False
        self._error: StrataError | None = None
        self._wake: asyncio.Future[None] | None = None
        self._stalled = False

    # -- the Link protocol

    async def recv(self) -> Any:
        while True:
            if self.closed or (self._over and self._error is not None):
                break
            if self._inbox and not self._stalled:
                return self._inbox.popleft()
            if self._over:
                break
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if self._dialled and self._error is not None:
            raise self._error
        return None

    def send(self, message: Message) -> None:
        if self.closed or self._over:
            return
        if self.backlog >= self._limit:
            self.close(Unavailable("the other side reads too slowly", hint="reconnect and resync"))
            return
        self.other._coming += 1
        copy = type(message).FromString(message.SerializeToString())
        self._later(self.other._take, copy)

    def close(self, error: StrataError | None = None) -> None:
        if not self.closed:
            self.closed = True
            self._error = self._error or error
            self._later(self.other._end, None if self._dialled else error)
            self._rouse()

    @property
    def backlog(self) -> int:
        return self.other._coming + len(self.other._inbox)

    # -- faults

    def break_off(self) -> None:
        """Lose the transport: both ends learn of it now, messages on their way are lost."""
        for end in (self, self.other):
            end._end(Unavailable("the connection broke"))

    def stall(self, stalled: bool = True) -> None:
        """Stop reading, or go on."""
        self._stalled = stalled
        self._rouse()

    # -- inside

    def _later(self, act: Callable[[Any], None], argument: Any) -> None:
        """Do it to the other end once the way there is over, in order."""
        self._way.append((act, argument))
        loop = asyncio.get_running_loop()
        if self._delay_s:
            loop.call_later(self._delay_s, self._arrive)  # equal times have no order of their own
        else:
            loop.call_soon(self._arrive)

    def _arrive(self) -> None:
        act, argument = self._way.popleft()
        act(argument)

    def _take(self, message: Message) -> None:
        self._coming -= 1
        if not self._over:
            self._inbox.append(message)
            self._rouse()

    def _end(self, error: StrataError | None) -> None:
        if not self._over:
            self._over = True
            self._error = self._error or error
            self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def pair(*, delay_s: float = 0.0, outbox_limit: int = 4096) -> tuple[MemoryLink, MemoryLink]:
    """Return the two ends of a new link: the one that dialled, and the one that accepted."""
    dialled = MemoryLink(dialled=True, delay_s=delay_s, outbox_limit=outbox_limit)
    accepted = MemoryLink(dialled=False, delay_s=delay_s, outbox_limit=outbox_limit)
    dialled.other, accepted.other = accepted, dialled
    return dialled, accepted


class Switchboard:
    """Who listens where, and which links there are."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self._listeners: dict[str, tuple[Serve, Spawn]] = {}
        self._links: set[tuple[str, str, MemoryLink]] = set()
        self._cut: set[frozenset[str]] = set()

    def listen(self, address: str, serve: Serve, spawn: Spawn) -> None:
        """Serve whoever dials `address`."""
        self._listeners[address] = (serve, spawn)

    def hang_up(self, address: str) -> None:
        """Listen there no more, and break every link of that address, in either direction."""
        self._listeners.pop(address, None)
        self._break(lambda caller, callee: address in {caller, callee})

    def cut(self, one: str, other: str) -> None:
        """Break the links between two addresses and let none be made."""
        self._cut.add(frozenset({one, other}))
        self._break(lambda caller, callee: {caller, callee} == {one, other})

    def mend(self, one: str, other: str) -> None:
        """Let links between two addresses be made again."""
        self._cut.discard(frozenset({one, other}))

    def links(self, caller: str, callee: str) -> list[MemoryLink]:
        """Return the dialling ends of the links from `caller` to `callee`."""
        return [link for one, other, link in self._links if (one, other) == (caller, callee)]

    @asynccontextmanager
    async def dial(self, caller: str, callee: str) -> AsyncIterator[MemoryLink]:
        """Have a link to whoever listens at `callee`; `Unavailable` when nobody does."""
        await asyncio.sleep(self.delay_s)
        found = self._listeners.get(callee)
        if found is None or frozenset({caller, callee}) in self._cut:
            raise Unavailable(f"{callee}: connection refused")
        serve, spawn = found
        dialled, accepted = pair(delay_s=self.delay_s)
        entry = (caller, callee, dialled)
        self._links.add(entry)

        async def served() -> None:
            try:
                await serve(accepted)
            finally:
                accepted.close()

        _task = spawn(served())
        try:
            yield dialled
        finally:
            self._links.discard(entry)
            dialled.close()

    def _break(self, which: Callable[[str, str], bool]) -> None:
        for caller, callee, link in tuple(self._links):
            if which(caller, callee):
                link.break_off()
