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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from strata.client.endpoints import Endpoint, Route
from strata.client.terms import Dial
from strata.errors import StrataError, Unavailable
from strata.session.link import Link
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


@dataclass(slots=True, kw_only=True)
class Found:
    """A replica that has welcomed the session. Its link stands until `release`."""

    endpoint: Endpoint
    link: Link[Down, Up]
    welcome: Welcome
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Let the connection go."""
        self.over.set()


class Lookout:
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
        self._asked: Endpoint | None = None
        """Who has our hello and has not answered yet."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        """The one that looks, and those that hold a connection found; in order, so that a run can be repeated."""
        self._found: Found | None = None

    def connected(self) -> None:
        """Take note of a new connection, of which nothing is known yet."""
        self._since = None

    def heard(self, ready: bool) -> None:
        """Take note of what the replica says of itself.

        Whoever has our hello may have the key by now, and would delete it if we never came: that
        answer is still waited for, and counts.
        """
        if ready:
            self._since = None
            if self._asked is None:
                self._stop()
        elif self._since is None:
            self._since, self._trouble = asyncio.get_running_loop().time(), "is not ready"

    def silent(self) -> None:
        """Take note that the replica has said nothing for so long that it is time to look, until it does."""
        if self._since is None:
            self._since = asyncio.get_running_loop().time() - self._unready_s
            self._trouble = "is silent"

    def look(self, link: Link[Down, Up]) -> None:
        """Begin to look, if it is time; close `link` once another replica has welcomed the session."""
        if self._looking is not None or self._since is None:
            return
        if asyncio.get_running_loop().time() - self._since < self._unready_s or not self._route.others():
            return

        def take(found: Found) -> None:
            self._found, self._looking = found, None
            link.close(Unavailable(f"{self._route.current} {self._trouble}, and {found.endpoint} is ready"))

        task = self._looking = asyncio.create_task(self._scout(take), name="scout")
        self._tasks[task] = None
        task.add_done_callback(lambda over: self._tasks.pop(over, None))

    def lost(self) -> None:
        """Take note that the connection is over: if none is found yet, the session looks by itself.

        First at whoever has our hello: that replica may have taken the key, which is why the one
        before let go, and it would delete it if we went elsewhere and were late.
        """
        if self._found is None:
            if self._asked is not None:
                self._route.ask_first(self._asked)
            self._stop()

    def take(self) -> Found | None:
        """Return the connection that was found, once."""
        found, self._found = self._found, None
        if found is not None:
            self._route.at(found.endpoint)
        return found

    async def end(self) -> None:
        """Stop looking, and let every connection go."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking, self._asked = None, None

    async def _scout(self, take: Callable[[Found], None]) -> None:
        """Ask the other endpoints, round after round, until one welcomes the session; then hold it."""
        rng, pause_s = self._route.rng, FIRST_PAUSE_S
        while True:
            others = self._route.others()
            for endpoint in rng.sample(others, len(others)):
                try:
                    if await self._ask(endpoint, take):
                        return
                except StrataError:
                    pass  # whatever it is, the session is served where it is and goes on there
                self._asked = None
                if self._since is None:  # the replica that serves is ready again
                    self._looking = None
                    return
            await asyncio.sleep(pause_s * rng.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _ask(self, endpoint: Endpoint, take: Callable[[Found], None]) -> bool:
        hello = self._introduce()
        hello.if_ready = True
        limit = asyncio.timeout(CONNECT_S)
        try:
            async with limit, self._dial(endpoint) as link:
                limit.reschedule(asyncio.get_running_loop().time() + WELCOME_S)
                link.send(Up(hello=hello))
                self._asked = endpoint
                down = await link.recv()
                if down is None or not down.HasField("welcome"):
                    return False
                limit.reschedule(None)
                self._asked = None
                found = Found(endpoint=endpoint, link=link, welcome=down.welcome)
                take(found)
                await found.over.wait()
                return True
        except TimeoutError:
            raise Unavailable(f"{endpoint} did not answer in time") from None
