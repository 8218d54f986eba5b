"""Client failover: look for another replica while the serving one is unready or silent (PROTOCOLS 5.5).

A replica that lost etcd and its peers knows no replica to which it could send its members. A frozen replica
cannot send its members anywhere. The leader soon counts the members of such a replica as orphans, although they
may still reach other replicas. So each member looks for another replica, and keeps its stream until another
replica has welcomed it. If no replica is ready, no stream is lost.

A replica that is not ready refuses a `Hello.if_ready` immediately. So a search is cheap, leaves nothing running,
and never takes a session from the replica that serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from strata.errors import StrataError, Unavailable
from strata.session.endpoints import Endpoint, Route
from strata.session.link import Link
from strata.session.terms import Dial
from strata.v1.session_pb2 import Down, Hello, Up, Welcome

CONNECT_S: Final = 0.4
"""Seconds each endpoint has to connect: a black hole must not use up the others' time."""
WELCOME_S: Final = 3.0
"""Seconds that a replica has to register the member, unless it refused immediately."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 4.0
"""Longest pause between two rounds over all endpoints; each pause is drawn from the upper half of this range.
When every replica lost etcd, every member searches. A thousand members then make about 700 short connections a
second, at replicas that have little else to do. A longer pause could miss the five seconds that the leader
gives to members of a lost replica once the other replicas have etcd again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A replica that has welcomed the session. Its link stays open until `stack` is closed."""

    endpoint: Endpoint
    link: Link[Down, Up]
    welcome: Welcome
    stack: AsyncExitStack


class Failover:
    """A session's response to the readiness of its replica. Call `end` with the session."""

    def __init__(self, route: Route, dial: Dial, introduce: Callable[[], Hello], *, unready_s: float) -> None:
        self._route = route
        self._dial = dial
        self._introduce = introduce
        self._unready_s = unready_s
        self._since: float | None = None
        """When the replica was first known to be unready; None while it is ready."""
        self._problem = ""
        self._looking: asyncio.Task[None] | None = None
        self._cancelled: list[asyncio.Task[None]] = []
        """Cancelled searches, which may still be closing a stream that they opened."""
        self._greeted: Endpoint | None = None
        """The endpoint that has our Hello and has not answered yet."""
        self._found: Found | None = None

    def note(self, problem: str, *, for_s: float = 0.0) -> None:
        """Record the replica's state: "" while it is well, else the problem, present for `for_s` seconds already."""
        if not problem:
            self._since = None
        elif self._since is None:
            self._since, self._problem = asyncio.get_running_loop().time() - for_s, problem

    def look(self, link: Link[Down, Up]) -> None:
        """Begin to search if a search is due; close `link` once another replica has welcomed the session.

        Closing a link takes up to a second while its replica is silent. A second search in that time would take
        the session from the replica that welcomed it. So no search starts until `take` has returned the replica
        that was found.
        """
        if (
            self._looking is not None
            or self._found is not None
            or self._since is None
            or not self._route.others()
        ):
            return
        if asyncio.get_running_loop().time() - self._since >= self._unready_s:
            self._looking = asyncio.create_task(self._search(link), name="failover")

    def lost(self) -> None:
        """Record that the connection is over; if no replica is found yet, the session's route takes over the search.

        The route first tries the endpoint that has our Hello. That replica may already own the session's key,
        and the old replica may have closed the stream for this reason. If the session went to a third replica
        instead, the owner would delete the key.
        """
        if self._looking is not None:
            if self._greeted is not None:
                self._route.try_first(self._greeted)
            self._looking.cancel()
            self._cancelled = [*(search for search in self._cancelled if not search.done()), self._looking]
            self._looking, self._greeted = None, None

    def take(self) -> Found | None:
        """Return the connection that was found, once."""
        found, self._found = self._found, None
        if found is not None:
            self._route.at(found.endpoint)
        return found

    async def end(self) -> None:
        """Stop searching and close a found connection that was not taken; return once no stream is open."""
        self.lost()
        if self._cancelled:
            await asyncio.wait(self._cancelled)
        if (found := self.take()) is not None:
            await found.stack.aclose()

    async def _search(self, link: Link[Down, Up]) -> None:
        """Try the other endpoints, round after round, until one welcomes the session or `link` is ready again.

        An endpoint that received our Hello may own the session's key by now, and would delete the key if the
        session never came. So the search always awaits that endpoint's answer, and accepts a welcome.
        """
        rng, pause_s = self._route.rng, FIRST_PAUSE_S
        while self._since is not None:
            others = self._route.others()
            for endpoint in rng.sample(others, len(others)):
                # whatever the refusal, the current replica still serves the session
                with contextlib.suppress(StrataError, TimeoutError):
                    self._found = await self._try(endpoint)
                self._greeted = None
                if self._found is not None or self._since is None:
                    break
            if self._found is not None:
                link.close(Unavailable(f"{self._route.current} {self._problem}, and {endpoint} is ready"))
                break
            await asyncio.sleep(pause_s * rng.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        self._looking = None

    async def _try(self, endpoint: Endpoint) -> Found | None:
        hello = self._introduce()
        hello.if_ready = True
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(CONNECT_S):
                link = await stack.enter_async_context(self._dial(endpoint))
            self._greeted = endpoint
            link.send(Up(hello=hello))
            async with asyncio.timeout(WELCOME_S):
                down = await link.recv()
            if down is not None and down.HasField("welcome"):
                return Found(endpoint=endpoint, link=link, welcome=down.welcome, stack=stack.pop_all())
        return None
