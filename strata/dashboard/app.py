"""The ASGI application: which path shows what, and what every answer carries.

Everything is read-only. Answers are never cached by others, and tell the browser to load nothing from
anywhere and to run no script but ours. On loopback only a Host that is an address or `localhost` is
answered, so that a page of somebody else's cannot read this one under a name of its own.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.config import is_loopback, split_address
from strata.dashboard.exposition import Exposition
from strata.dashboard.source import Source

HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def make_app(source: Source, *, listen: str) -> ASGIApp:
    """Return the application for one replica that is served at `listen`."""
    exposition = Exposition(source)

    async def healthz(_request: Request) -> Response:
        healthy, why = source.is_healthy()
        return PlainTextResponse(f"{why or 'ok'}\n", 200 if healthy else 503)

    async def readyz(_request: Request) -> Response:
        ready, why = source.is_ready()
        return PlainTextResponse(f"{why or 'ready'}\n", 200 if ready else 503)

    async def metrics(request: Request) -> Response:
        body, content_type = exposition.answer(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    routes = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
    ]
    host, _port = split_address("coordinator.http_listen", listen)
    return _Guard(Starlette(routes=routes), names_only_loopback=is_loopback(host))


class _Guard:
    """Refuses what is not for us, and adds to every answer what every answer carries."""

    def __init__(self, app: ASGIApp, *, names_only_loopback: bool) -> None:
        self._app = app
        self._names_only_loopback = names_only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        headers = dict(scope["headers"])
        if scope["method"] not in ("GET", "HEAD"):
            refusal = PlainTextResponse("this only shows things\n", 405, headers={"allow": "GET, HEAD"})
            await refusal(scope, receive, sending)
        elif self._names_only_loopback and not _is_local(headers.get(b"host", b"").decode("latin-1")):
            refusal = PlainTextResponse("open it as localhost, or by its address\n", 421)
            await refusal(scope, receive, sending)
        else:
            await self._app(scope, receive, sending)


def _is_local(host: str) -> bool:
    """Tell whether a Host header names an address or this machine, and no name that somebody chose."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name in ("localhost", ""):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
