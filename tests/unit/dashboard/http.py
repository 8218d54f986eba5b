"""Requests to the dashboard's application, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message


class Answer:
    """The application's answer to one request."""

    def __init__(self, messages: list[Message]) -> None:
        self.code = int(messages[0]["status"])
        self.headers = {key.decode(): value.decode() for key, value in messages[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def scope_of(
    path: str, method: str, headers: Mapping[str, str], state: dict[str, Any] | None
) -> dict[str, Any]:
    path, _, query = path.partition("?")
    named = {"host": "localhost", **headers}
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(key.lower().encode(), value.encode()) for key, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": state or {},
    }


async def ask(
    app: ASGIApp,
    path: str,
    *,
    method: str = "GET",
    body: bytes = b"",
    state: dict[str, Any] | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Answer:
    """Send one request; return its answer."""
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    await app(scope_of(path, method, headers, state), receive, send)
    return Answer(messages)


class Stream:
    """A stream of the API with its reader."""

    def __init__(self) -> None:
        self.code = 0
        self.pieces: list[bytes] = []
        self.stayed = 0
        self.closed = asyncio.Event()
        self.stuck = False

    def changes(self) -> list[tuple[int, str, Any]]:
        """Return (id, path, body) of each event so far."""
        found = []
        for event in b"".join(self.pieces).split(b"\n\n"):
            fields = dict(line.split(b": ", 1) for line in event.splitlines() if not line.startswith(b":"))
            if fields:
                assert fields[b"event"] == b"change"
                data = json.loads(fields[b"data"])
                found.append((int(fields[b"id"]), data["path"], data["body"]))
        return found

    def bodies(self, path: str) -> list[Any]:
        return [body for _id, of, body in self.changes() if of == path]

    def stays(self) -> None:
        self.stayed += 1


@asynccontextmanager
async def streaming(
    app: ASGIApp, query: str, headers: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Stream]:
    """Read a stream of the API inside the block."""
    made = Stream()

    async def receive() -> Message:
        await made.closed.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if made.stuck:
            await asyncio.Event().wait()
        if message["type"] == "http.response.start":
            made.code = message["status"]
        else:
            made.pieces.append(message.get("body", b""))

    scope = scope_of(f"/api/v1/stream?{query}", "GET", headers, {"stays": made.stays})

    async def serve() -> None:
        await app(scope, receive, send)

    task = asyncio.create_task(serve())
    await asyncio.sleep(0.01)
    try:
        yield made
    finally:
        made.closed.set()
        async with asyncio.timeout(30):
            await task
