"""The stream of changes: one response for all that a page shows, in server-sent events.

Once a second each watched resource is looked at, and sent if it changed since it was last sent. A body is made once
for all who watch it (`resources`). The events of a cluster or job, and the history of a job, are sent in parts: what
is newer than the part before. The id of an event is the revision up to which `events` were sent (without them, that of the view), so a client that
connects again, here or at another replica, gets each of the keyspace's events once.

A client that does not read is cut off `SEND_S` after its buffers are full; one whose credential is revoked within `auth.review_s`.
"""

from __future__ import annotations

import asyncio
import math
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from strata.dashboard.api import model
from strata.dashboard.api.history import DEFAULT_MS
from strata.dashboard.api.resources import Body, Resource, Resources, problem
from strata.dashboard.source import Source
from strata.errors import InvalidArgument, QuotaExceeded, StrataError, Unauthenticated
from strata.observe import get_logger

log = get_logger()

EVERY_S: Final = 1.0
SEND_S: Final = 10.0
MAX_WATCHED: Final = 32
MAX_STREAMS: Final = 64
MAX_PER_ADDRESS: Final = 32
"""Each half of the connections for HTTP (`core.access.connection_limits`): the other half stays for everything else."""
PARTS: Final[Mapping[str, str]] = {"events": "after_revision", "history": "since_unix_ms"}
"""The resources that are sent in parts, by the last word of their path; and what says after which part."""
NO_EVENTS: Final = msgspec.json.encode(model.Events(events=()))
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
    (b"connection", b"close"),
)


@dataclass(slots=True)
class _Watched:
    """One watched path, and what was last sent of it."""

    path: str
    sent: bytes | None = None
    after: int = 0
    """Of a resource that is sent in parts: up to where it was sent."""

    @property
    def kind(self) -> str:
        return self.path.partition("?")[0].rpartition("/")[2]

    def now(self) -> str:
        """Return the path of what is to be sent next."""
        if self.kind not in PARTS or not self.after:
            return self.path
        return f"{self.path}{'&' if '?' in self.path else '?'}{PARTS[self.kind]}={self.after}"

    def news(self, made: Body) -> bool:
        """Take note of a body that was made of `now`; tell whether it is to be sent."""
        first, self.sent, before = self.sent is None, made.json, self.sent
        match self.kind:
            case _ if not made.unix_s:  # a problem
                return made.json != before
            case "events":
                self.after = max(self.after, made.revision)
                return first or made.json != NO_EVENTS
            case "history":
                query = urllib.parse.parse_qs(self.path.partition("?")[2])
                interval_ms = int(query.get("interval_ms", [DEFAULT_MS])[-1])
                until, so_far = 1000 * made.unix_s // interval_ms * interval_ms, self.after
                self.after = max(so_far, until)
                return first or until > so_far
            case _:
                return made.json != before


@dataclass(slots=True, kw_only=True)
class Streams:
    """The streams that are open at one replica."""

    source: Source
    resources: Resources
    open: Counter[str] = field(default_factory=Counter)
    """By address."""

    def watched(self, scope: Scope) -> list[str]:
        """Return the paths that a request watches; `InvalidArgument` if those are none, or too many."""
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"))
        paths = list(dict.fromkeys(query.get("watch", ())))
        if not 1 <= len(paths) <= MAX_WATCHED:
            raise InvalidArgument(
                f"{len(paths)} paths are watched",
                hint=f"?watch=/cluster&watch=/jobs/…, at most {MAX_WATCHED}",
            )
        return paths

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        find: Callable[[str], Resource],
        stays: Callable[[], None],
        end: Callable[[], None],
        review_s: float,
        longest_s: float = math.inf,
    ) -> None:
        """Serve one stream to its end, which comes after `longest_s` at the latest.

        `find` returns what the caller may look at, or raises why not; it is asked again every `review_s`. `stays`
        tells the server that this connection lives for longer than others, `end` that it is to be closed at once.
        """
        paths = [_Watched(path) for path in self.watched(scope)]
        _admit(paths, find)
        address = str((scope.get("client") or ("",))[0])
        if self.open.total() >= MAX_STREAMS or self.open[address] >= MAX_PER_ADDRESS:
            raise QuotaExceeded(
                f"{self.open.total()} streams are open at this replica, {self.open[address]} of them from {address}",
                hint="watch another replica, or close a tab",
            )
        self._resume(paths, scope)
        gone = asyncio.create_task(_gone(receive))
        self.open[address] += 1
        try:
            stays()
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            await self._send_all(paths, send, gone, find, review_s, longest_s)
        except TimeoutError:
            log.info("stream_not_read", paths=[each.path for each in paths])
            end()
        finally:
            self.open[address] -= 1
            self.open += Counter()  # forgets those that have none
            gone.cancel()

    def _resume(self, paths: list[_Watched], scope: Scope) -> None:
        """Begin where an earlier stream of this client ended."""
        last = dict(scope["headers"]).get(b"last-event-id", b"").decode("latin-1")
        for each in paths:
            if each.kind == "events" and last.isascii() and last.isdecimal() and len(last) < 20:
                each.after = int(last)

    async def _send_all(
        self,
        paths: list[_Watched],
        send: Send,
        gone: asyncio.Task[None],
        find: Callable[[str], Resource],
        review_s: float,
        longest_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s = reviewed_s = due_s = loop.time()
        while not gone.done() and loop.time() - began_s < longest_s:
            if loop.time() - reviewed_s >= review_s:
                reviewed_s = loop.time()
                _admit(paths, find)
            changes = b"".join([await self._change(each, paths, find) for each in paths])
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": changes or b":\n\n", "more_body": True})
            due_s = max(due_s + EVERY_S, loop.time())
            await asyncio.wait([gone], timeout=due_s - loop.time())

    async def _change(
        self, watched: _Watched, paths: list[_Watched], find: Callable[[str], Resource]
    ) -> bytes:
        """Return the event that tells how a resource changed; nothing if it did not."""
        revision = self.source.view.revision
        try:
            made = await self.resources.body(find(watched.now()))
        except StrataError as error:  # a job that is deleted while it is watched
            made = Body(json=problem(error)[1], revision=revision, unix_s=0)
        if not watched.news(made):
            return b""
        change = msgspec.json.encode(model.Change(path=watched.path, body=msgspec.Raw(made.json)))
        # what has the events resumed must not run ahead of those that were sent
        number = min((each.after for each in paths if each.kind == "events"), default=made.revision)
        return b"id: %d\nevent: change\ndata: %s\n\n" % (number, change)


def _admit(paths: list[_Watched], find: Callable[[str], Resource]) -> None:
    """Raise if the caller is not known (any more). What they may not see, or what is not there, is told as its body."""
    for each in paths:
        try:
            find(each.path)
        except Unauthenticated:
            raise
        except StrataError:
            pass


async def _gone(receive: Receive) -> None:
    """Return once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
