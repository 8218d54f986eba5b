"""Looking for another replica while the one that serves is not ready, or silent (PROTOCOLS 5.5).

A replica that lost etcd and its peers knows nobody to send its members to, nor does one that froze
before it knew; the leader takes them for orphans before long. Its members may reach the others all
the same. So they look, and keep what they have until another replica has welcomed them: when nobody
is ready, no stream is lost.

A `Hello.if_ready` is refused at once by who is not ready, so that a look costs little, leaves
nothing under way behind it, and never takes a session from the replica that it already has.
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
"""How long each endpoint is given to connect: a black hole must not use up the others' time."""
WELCOME_S: Final = 3.0
"""How long one that did not refuse at once may take to register the member."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 4.0
"""Between two rounds over all endpoints; drawn from the upper half. When every replica lost etcd,
every member looks: a thousand of them then make some seven hundred short connections a second, at
replicas that have little else to do. A longer pause could miss the five seconds that the leader
leaves to members of a replica that is gone, once the others have etcd again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A replica that has welcomed the session. Its link stands until `stack` is closed."""

    endpoint: Endpoint
    link: Link[Down, Up]
    welcome: Welcome
    stack: AsyncExitStack


class Failover:
    """What one session does about the readiness of the replica that serves it. `end` it with the session."""

    def __init__(self, route: Route, dial: Dial, introduce: Callable[[], Hello], *, unready_s: float) -> None:
        self._route = route
        self._dial = dial
        self._introduce = introduce
        self._unready_s = unready_s
        self._since: float | None = None
        """When it was first heard that the replica is not ready; None while it is."""
        self._trouble = ""
        self._looking: asyncio.Task[None] | None = None
        self._cancelled: list[asyncio.Task[None]] = []
        """The scouts that were cancelled, and may still be letting go of a stream that they had opened."""
        self._asked: Endpoint | None = None
        """Who has our hello and has not answered yet."""
        self._found: Found | None = None

    def note(self, trouble: str, *, for_s: float = 0.0) -> None:
        """Take note of how the replica is: "" while nothing is wrong with it, else what is, for so long by now."""
        if not trouble:
            self._since = None
        elif self._since is None:
            self._since, self._trouble = asyncio.get_running_loop().time() - for_s, trouble

    def look(self, link: Link[Down, Up]) -> None:
        """Begin to look, if it is time; close `link` once another replica has welcomed the session.

        Closing a link takes up to a second while its replica is silent. A second look in that time would take the
        session from the replica that welcomed it, so there is none while a replica is found and not taken.
        """
        if (
            self._looking is not None
            or self._found is not None
            or self._since is None
            or not self._route.others()
        ):
            return
        if asyncio.get_running_loop().time() - self._since >= self._unready_s:
            self._looking = asyncio.create_task(self._scout(link), name="scout")

    def lost(self) -> None:
        """Take note that the connection is over: if none is found yet, the session looks by itself.

        First at whoever has our hello: that replica may have taken the key, which is why the one
        before let go, and it would delete it if we went elsewhere and were late.
        """
        if self._looking is not None:
            if self._asked is not None:
                self._route.ask_first(self._asked)
            self._looking.cancel()
            self._cancelled = [*(scout for scout in self._cancelled if not scout.done()), self._looking]
            self._looking, self._asked = None, None

    def take(self) -> Found | None:
        """Return the connection that was found, once."""
        found, self._found = self._found, None
        if found is not None:
            self._route.at(found.endpoint)
        return found

    async def end(self) -> None:
        """Stop looking, and let go of what was found and not taken; return once no stream is left open."""
        self.lost()
        if self._cancelled:
            await asyncio.wait(self._cancelled)
        if (found := self.take()) is not None:
            await found.stack.aclose()

    async def _scout(self, link: Link[Down, Up]) -> None:
        """Ask the other endpoints, round after round, until one welcomes the session or `link` is ready again.

        Whoever has our hello may have the key by now, and would delete it if we never came: that
        answer is waited for in any case, and counts.
        """
        rng, pause_s = self._route.rng, FIRST_PAUSE_S
        while self._since is not None:
            others = self._route.others()
            for endpoint in rng.sample(others, len(others)):
                # whatever the refusal is, the session is served where it is and goes on there
                with contextlib.suppress(StrataError, TimeoutError):
                    self._found = await self._ask(endpoint)
                self._asked = None
                if self._found is not None or self._since is None:
                    break
            if self._found is not None:
                link.close(Unavailable(f"{self._route.current} {self._trouble}, and {endpoint} is ready"))
                break
            await asyncio.sleep(pause_s * rng.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        self._looking = None

    async def _ask(self, endpoint: Endpoint) -> Found | None:
        hello = self._introduce()
        hello.if_ready = True
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(CONNECT_S):
                link = await stack.enter_async_context(self._dial(endpoint))
            self._asked = endpoint
            link.send(Up(hello=hello))
            async with asyncio.timeout(WELCOME_S):
                down = await link.recv()
            if down is not None and down.HasField("welcome"):
                return Found(endpoint=endpoint, link=link, welcome=down.welcome, stack=stack.pop_all())
        return None
