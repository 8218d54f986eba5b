"""The stream of changes (server-sent events): one response for all resources that a page watches.

Once a second the stream renders each watched resource, and sends the body if it changed since the last time. A body
is rendered once for all clients that watch the resource (`resources`). The events of a cluster or job, and the
history of a job, are sent in parts: each part has only data that is newer than the last part. The id of a server-sent
event is the revision up to which `events` were sent, or the view's revision if the client watches no `events`. So a
client that reconnects to this or another replica gets each event of the keyspace once.

If a client does not read, the stream ends `SEND_S` after the client's buffers are full. If a client's credential is
revoked, the stream ends within `auth.review_s`.
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
"""Streams get half of the HTTP connections, in total and per address (`core.access.connection_limits`);
requests get the rest.
"""
PARTS: Final[Mapping[str, str]] = {"events": "after_revision", "history": "since_unix_ms"}
"""The resources sent in parts, by the last word of the path -> the query parameter for the end of the last part."""
NO_EVENTS: Final = msgspec.json.encode(model.Events(events=()))
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
    (b"connection", b"close"),
)


@dataclass(slots=True)
class _Watched:
    """One watched path, and the body that was last sent for it."""

    path: str
    sent: bytes | None = None
    after: int = 0
    """For a resource that is sent in parts: the revision or time up to which it was sent."""

    @property
    def kind(self) -> str:
        return self.path.partition("?")[0].rpartition("/")[2]

    def now(self) -> str:
        """Return the path of the next part to send."""
        if self.kind not in PARTS or not self.after:
            return self.path
        return f"{self.path}{'&' if '?' in self.path else '?'}{PARTS[self.kind]}={self.after}"

    def news(self, made: Body) -> bool:
        """Record a body that was made for the path `now`; return whether to send the body."""
        first, self.sent, before = self.sent is None, made.json, self.sent
        match self.kind:
            case _ if not made.unix_s:  # an error
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
    """The count of each address."""

    def watched(self, scope: Scope) -> list[str]:
        """Return the paths that a request watches; `InvalidArgument` if there are none or too many."""
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
        exempt: Callable[[], None],
        end: Callable[[], None],
        review_s: float,
        longest_s: float = math.inf,
    ) -> None:
        """Serve one stream, for at most `longest_s`.

        `find` returns the resource if the caller may read it, else raises the refusal; `find` is called again
        every `review_s`. `exempt` exempts this connection from the server's limit on lifetimes; `end` resets
        the connection immediately.
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
        disconnected = asyncio.create_task(_wait_for_disconnect(receive))
        self.open[address] += 1
        try:
            exempt()
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            await self._send_all(paths, send, disconnected, find, review_s, longest_s)
        except TimeoutError:
            log.info("stream_not_read", paths=[each.path for each in paths])
            end()
        finally:
            self.open[address] -= 1
            self.open += Counter()  # removes addresses with a count of 0
            disconnected.cancel()

    def _resume(self, paths: list[_Watched], scope: Scope) -> None:
        """Begin after the last event that the client received on an earlier stream."""
        last = dict(scope["headers"]).get(b"last-event-id", b"").decode("latin-1")
        for each in paths:
            if each.kind == "events" and last.isascii() and last.isdecimal() and len(last) < 20:
                each.after = int(last)

    async def _send_all(
        self,
        paths: list[_Watched],
        send: Send,
        disconnected: asyncio.Task[None],
        find: Callable[[str], Resource],
        review_s: float,
        longest_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s = reviewed_s = due_s = loop.time()
        while not disconnected.done() and loop.time() - began_s < longest_s:
            if loop.time() - reviewed_s >= review_s:
                reviewed_s = loop.time()
                _admit(paths, find)
            changes = b"".join([await self._change(each, paths, find) for each in paths])
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": changes or b":\n\n", "more_body": True})
            due_s = max(due_s + EVERY_S, loop.time())
            await asyncio.wait([disconnected], timeout=due_s - loop.time())

    async def _change(
        self, watched: _Watched, paths: list[_Watched], find: Callable[[str], Resource]
    ) -> bytes:
        """Return the server-sent event with a resource's change, or nothing if it did not change."""
        revision = self.source.view.revision
        try:
            made = await self.resources.body(find(watched.now()))
        except StrataError as error:  # for example, the watched job was deleted
            made = Body(json=problem(error)[1], revision=revision, unix_s=0)
        if not watched.news(made):
            return b""
        change = msgspec.json.encode(model.Change(path=watched.path, body=msgspec.Raw(made.json)))
        # A client resumes its events after this id, so the id must not be above the revision of the events that were
        # sent.
        number = min((each.after for each in paths if each.kind == "events"), default=made.revision)
        return b"id: %d\nevent: change\ndata: %s\n\n" % (number, change)


def _admit(paths: list[_Watched], find: Callable[[str], Resource]) -> None:
    """Raise if the caller is not (or no longer) authenticated. Other errors of a path are sent as the path's body."""
    for each in paths:
        try:
            find(each.path)
        except Unauthenticated:
            raise
        except StrataError:
            pass


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
