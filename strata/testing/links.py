"""Links in memory: the counterpart of `strata.wire.streams` over gRPC, between coroutines of one loop.

    board = Switchboard()
    board.listen("b", serve, tasks.create_task)      # serve(link) runs for each dial
    async with board.dial("a", "b") as link: ...
    board.cut("a", "b")                              # the links between a and b break, and new links fail
    board.reject("a", "b")                           # as `cut`, but peers get resets and refusals
    board.block("a", "b")                            # messages from a to b do not arrive, and no error is raised

A link has two ends: the *dialling* end and the *accepting* end. The links keep the guarantees of the real ones.
Messages stay in order. At a break the dialling end gets `Unavailable`, the accepting end None. Messages sent before a
clean close arrive; messages in transit at a break may be lost. Messages are copied, as by serialisation. If the other
side does not answer (blocked, or frozen as a `Process`), an end of a link breaks within `keepalive_s`, as HTTP/2
pings would break it. A link within one host does not break in this way, since a Unix socket has no pings.

An address is `host` or `host/port name`; blocks and delays apply to hosts.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from strata.errors import StrataError, TransportBroken, Unavailable
from strata.testing.processes import BETWEEN, Process, current

Serve = Callable[["MemoryLink"], Coroutine[Any, Any, None]]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

CONNECT_S = 2.0
"""How long a dial waits for a listener that does not answer, as `strata.transport.channel` does."""
FLUSH_S = 1.0
"""How long a closed dialling end waits for a silent other side, as `strata.wire.streams` does."""


class MemoryLink:
    """One end of a link; `pair` makes both. A stalled end (`stall`) reads nothing, as if frozen."""

    def __init__(self, *, dialled: bool, delay_s: Callable[[], float], outbox_limit: int) -> None:
        self.other: MemoryLink = self
        self.closed = False
        self.process = current()
        self._dialled = dialled
        self._delay_s = delay_s
        self._limit = outbox_limit
        self._inbox: deque[Message] = deque()
        self._coming = 0
        self._way: deque[tuple[float, Callable[[Any], None], Any]] = deque()
        self._blocked = False
        self._over = False
        self._error: StrataError | None = None
        self._wake: asyncio.Future[None] | None = None
        self._stalled = False

    # -- the Link protocol

    async def recv(self) -> Any:
        while True:
            if (self.closed and not self._dialled) or (self._over and self._error is not None):
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
            if self._dialled:
                asyncio.get_running_loop().call_later(FLUSH_S, self._end, None, context=BETWEEN)
            self._rouse()

    def check(self) -> None:
        pass

    @property
    def backlog(self) -> int:
        return self.other._coming + len(self.other._inbox)

    # -- faults

    def break_off(self, error: StrataError | None = None) -> None:
        """Break the transport: both ends learn of the break now, and messages in transit are lost.

        The default `error` is `TransportBroken`, for a reset.
        """
        for end in (self, self.other):
            end._end(error or TransportBroken("the connection was reset"))

    def give_up(self) -> None:
        """Break the transport at this end; the other end learns of the break only if it can be reached."""
        self._end(Unavailable("the other side does not answer pings"))
        self._way.clear()
        self._later(self.other._end, TransportBroken("the connection was reset"))

    def stall(self, stalled: bool = True) -> None:
        """Stop reading, or resume reading."""
        self._stalled = stalled
        self._rouse()

    def block(self, blocked: bool) -> None:
        """Hold back this end's messages, or deliver them again, including those that were held back."""
        was, self._blocked = self._blocked, blocked
        if was and not blocked and self._way:
            self._arm()

    @property
    def over(self) -> bool:
        """Whether this end knows that the link has ended."""
        return self._over or self.closed

    # -- inside

    def _later(self, act: Callable[[Any], None], argument: Any) -> None:
        """Call `act` on the other end after the delay; calls keep the order of sending."""
        due = asyncio.get_running_loop().time() + self._delay_s()
        if self._way:
            due = max(due, self._way[-1][0])
        self._way.append((due, act, argument))
        if len(self._way) == 1 and not self._blocked:
            self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        due = self._way[0][0]
        if due <= loop.time():
            loop.call_soon(self._arrive, context=BETWEEN)
        else:
            loop.call_at(due, self._arrive, context=BETWEEN)

    def _arrive(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._way and not self._blocked and self._way[0][0] <= now:
            _due, act, argument = self._way.popleft()
            act(argument)
        if self._way and not self._blocked:
            self._arm()

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


def pair(
    *, delay_s: float | Callable[[], float] = 0.0, outbox_limit: int = 4096
) -> tuple[MemoryLink, MemoryLink]:
    """Return the two ends of a new link: the dialling end and the accepting end."""
    delay = delay_s if callable(delay_s) else lambda: delay_s
    dialled = MemoryLink(dialled=True, delay_s=delay, outbox_limit=outbox_limit)
    accepted = MemoryLink(dialled=False, delay_s=delay, outbox_limit=outbox_limit)
    dialled.other, accepted.other = accepted, dialled
    return dialled, accepted


@dataclass(frozen=True, slots=True)
class _Listener:
    serve: Serve
    spawn: Spawn
    context: Context
    process: Process | None


@dataclass(eq=False, slots=True)
class _Entry:
    """One existing link: `link` is the dialling end, `link.other` the accepting end."""

    caller: str
    callee: str
    link: MemoryLink

    def ends(self) -> tuple[tuple[str, MemoryLink, str], ...]:
        """Return a tuple for each end: its host, the end itself, and the other end's host."""
        here, there = host_of(self.caller), host_of(self.callee)
        return (here, self.link, there), (there, self.link.other, here)


def host_of(address: str) -> str:
    """Return the host of an address, which may have a `/port name` suffix."""
    return address.partition("/")[0]


class Switchboard:
    """The simulated network: listeners, links, and faults between hosts.

    A message between two hosts is delayed by `delay_s`, plus `lag_s(sender, receiver)`.
    """

    def __init__(
        self, *, delay_s: float = 0.0, keepalive_s: float = 4.0, rng: random.Random | None = None
    ) -> None:
        self.delay_s = delay_s
        self.lag_s: Callable[[str, str], float] = lambda _sender, _receiver: 0.0
        self._keepalive_s = keepalive_s
        self._rng = rng or random.Random(0)
        self._listeners: dict[str, _Listener] = {}
        self._links: dict[_Entry, None] = {}
        self._cut: set[frozenset[str]] = set()
        self._rejected: set[frozenset[str]] = set()
        self._blocked: set[tuple[str, str]] = set()
        self._watched: set[int] = set()
        self._changed = asyncio.Event()

    def listen(self, address: str, serve: Serve, spawn: Spawn) -> None:
        """Call `serve` for each dial to `address`; `serve` runs as a part of the program that called `listen`."""
        self._listeners[address] = _Listener(serve, spawn, copy_context(), self._watch(current()))
        self._change()

    def hang_up(self, address: str) -> None:
        """Stop listening at `address`, and break every link of that address, in either direction."""
        self._listeners.pop(address, None)
        self._break(lambda caller, callee: address in {caller, callee})
        self._change()

    # -- faults

    def cut(self, one: str, other: str) -> int:
        """Break the links between two addresses and prevent new links, as if all packets were lost.

        Returns the number of broken links.
        """
        self._cut.add(frozenset({one, other}))
        silence = Unavailable("no answer came in time")
        return self._break(lambda caller, callee: {caller, callee} == {one, other}, silence)

    def reject(self, one: str, other: str) -> int:
        """Reset the links between two addresses and refuse new links, as a firewall's REJECT does.

        Returns the number of broken links.
        """
        self._rejected.add(frozenset({one, other}))
        return self._break(lambda caller, callee: {caller, callee} == {one, other})

    def mend(self, one: str, other: str) -> None:
        """Allow links between two addresses again."""
        self._cut.discard(frozenset({one, other}))
        self._rejected.discard(frozenset({one, other}))

    def answers(self, caller: str, callee: str) -> bool | None:
        """Return the result of a plain connect: True for a listener, False for a refusal, None for no answer.

        A frozen program counts as a listener, because the kernel accepts for it.
        """
        if frozenset({caller, callee}) in self._cut or not self.is_open(host_of(caller), host_of(callee)):
            return None
        return callee in self._listeners and frozenset({caller, callee}) not in self._rejected

    def block(self, sender: str, receiver: str) -> None:
        """Silently hold back messages from one host to the other until `unblock`."""
        self._blocked.add((sender, receiver))
        self._change()

    def unblock(self, sender: str, receiver: str) -> None:
        """Deliver the messages again; a link loses no message, unless one of its ends has given up."""
        self._blocked.discard((sender, receiver))
        self._change()

    def blocks(self, one: str, other: str) -> bool:
        """Return whether messages between two hosts are held back in either direction."""
        return (one, other) in self._blocked or (other, one) in self._blocked

    def links(self, caller: str, callee: str) -> list[MemoryLink]:
        """Return the dialling ends of the links from `caller` to `callee`."""
        return [e.link for e in self._links if (e.caller, e.callee) == (caller, callee)]

    def between(self, one: str, other: str) -> list[MemoryLink]:
        """Return the dialling ends of the links between two hosts, in either direction."""
        hosts = {one, other}
        return [e.link for e in self._links if {host_of(e.caller), host_of(e.callee)} == hosts]

    def is_open(self, one: str, other: str) -> bool:
        """Return whether messages between two hosts arrive in both directions."""
        return (one, other) not in self._blocked and (other, one) not in self._blocked

    # -- connecting

    @asynccontextmanager
    async def dial(self, caller: str, callee: str) -> AsyncIterator[MemoryLink]:
        """Open a link to the listener at `callee`; raise `Unavailable` if there is none."""
        await asyncio.sleep(self.delay_s)
        listener = await self._reached(caller, callee)
        entry = self._connect(caller, callee, listener)
        try:
            yield entry.link
        finally:
            entry.link.close()
            self._sweep()

    def _connect(self, caller: str, callee: str, listener: _Listener) -> _Entry:
        here, there = host_of(caller), host_of(callee)
        dialled, accepted = pair()
        dialled._delay_s = lambda: self.delay_s + self.lag_s(here, there)
        accepted._delay_s = lambda: self.delay_s + self.lag_s(there, here)
        self._watch(dialled.process)
        accepted.process = listener.process
        entry = _Entry(caller, callee, dialled)
        self._links[entry] = None

        async def served() -> None:
            try:
                await listener.serve(accepted)
            finally:
                accepted.close()
                self._sweep()

        _task = listener.context.copy().run(listener.spawn, served())
        return entry

    async def _reached(self, caller: str, callee: str) -> _Listener:
        """Return the listener at `callee` once the listener answers."""
        try:
            async with asyncio.timeout(CONNECT_S):
                while True:
                    found = self._listeners.get(callee)
                    answers = found is None or found.process is None or not found.process.frozen
                    if answers and self.is_open(host_of(caller), host_of(callee)):
                        break
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(f"{callee} did not answer within {CONNECT_S:g} s") from None
        if found is None or not self.answers(caller, callee):
            raise Unavailable(f"{callee}: connection refused")
        return found

    # -- inside

    def _watch(self, process: Process | None) -> Process | None:
        if process is not None and id(process) not in self._watched:
            self._watched.add(id(process))
            process.watch(self._change)
        return process

    def _change(self) -> None:
        """Re-evaluate every link after a change of blocks, listeners or frozen programs."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        loop = asyncio.get_running_loop() if self._links else None
        for entry in self._links:
            for here, end, there in entry.ends():
                end.block((here, there) in self._blocked)
                if loop is not None and here != there and not self._pings_answered(here, end, there):
                    wait_s = self._keepalive_s * self._rng.uniform(0.625, 1.0)
                    loop.call_later(wait_s, self._ping, entry, context=BETWEEN)

    def _pings_answered(self, here: str, end: MemoryLink, there: str) -> bool:
        """Return whether the pings of this end are answered."""
        return self.is_open(here, there) and not (end.other.process is not None and end.other.process.frozen)

    def _ping(self, entry: _Entry) -> None:
        """Break the ends whose pings are not answered, unless their own program is frozen."""
        for here, end, there in entry.ends():
            frozen = end.process is not None and end.process.frozen
            if not end.over and not frozen and not self._pings_answered(here, end, there):
                end.give_up()

    def _sweep(self) -> None:
        """Forget a link once both ends know that the link has ended."""
        for entry in [e for e in self._links if e.link.over and e.link.other.over]:
            del self._links[entry]

    def _break(self, which: Callable[[str, str], bool], error: StrataError | None = None) -> int:
        broken = 0
        for entry in self._there():
            if which(entry.caller, entry.callee):
                entry.link.break_off(error)
                broken += 1
        self._sweep()
        return broken

    def _there(self) -> Iterator[_Entry]:
        yield from [e for e in self._links if not e.link.over or not e.link.other.over]
