"""The ASGI application of a replica's HTTP port: routes, headers of every answer, refusal of foreign origins.

Only actions of the API change anything. No cache may store an answer. The headers forbid the browser to load anything
from other servers, and to run any script but ours. If callers need no credential, the Host header must be an address,
`localhost` or a replica's own name. Otherwise a foreign page could read our pages under its own host name (DNS
rebinding).
"""

from __future__ import annotations

import re
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.dashboard.api.routes import ROOT, Api
from strata.dashboard.authorizer import HttpAuthorizer
from strata.dashboard.bundle import Bundle
from strata.dashboard.exposition import Exposition
from strata.dashboard.origins import PREFLIGHT, allowing, is_known, is_own_name
from strata.dashboard.plain import PlainPages
from strata.dashboard.source import Source
from strata.errors import StrataError, Unauthenticated

PROBES: Final = frozenset({"/healthz", "/readyz"})
_PROTECTED: Final = re.compile(r"/(?:metrics|status(?:/(?P<job>[^/]*))?)/?$")
"""Paths outside the API that show a cluster or a job. The API checks its callers itself."""

HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def make_app(source: Source, *, authorizer: HttpAuthorizer) -> ASGIApp:
    """Return the application for one replica."""
    exposition = Exposition(source)

    async def healthz(_request: Request) -> Response:
        healthy, why = source.is_healthy()
        return PlainTextResponse(f"{why or 'ok'}\n", 200 if healthy else 503)

    async def readyz(_request: Request) -> Response:
        ready, why = source.is_ready()
        return PlainTextResponse(f"{why or 'ready'}\n", 200 if ready else 503)

    async def metrics(request: Request) -> Response:
        body, content_type = await exposition.answer(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    plain = PlainPages(source)
    routes = [
        Route("/status", plain.answer),
        Route("/status/{job}", plain.answer),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        *Api(source, authorizer).routes(),
        *Bundle(source).routes(),
    ]
    return _Guard(Starlette(routes=routes), source, authorizer)


class _Guard:
    """Refuses requests that the application must not serve, and adds the common headers to every answer."""

    def __init__(self, app: ASGIApp, source: Source, authorizer: HttpAuthorizer) -> None:
        self._app = app
        self._source = source
        self._authorizer = authorizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        origin, host = headers.get(b"origin", ""), headers.get(b"host", "")
        known = bool(origin) and is_known(self._source, origin, host)
        foreign = not known and (bool(origin) or headers.get(b"sec-fetch-site") == "cross-site")
        also = [*HEADERS, *(allowing(origin) if known else ())]

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = message.get("headers", [])
                named = {key for key, _value in own}
                message["headers"] = [*own, *(each for each in also if each[0] not in named)]
            await send(message)

        answer = self._refusal(scope, host, foreign=foreign)
        if answer is None and scope["method"] == "OPTIONS":
            also += PREFLIGHT
            answer = Response(status_code=204)
        await (answer or self._app)(scope, receive, sending)

    def _refusal(self, scope: Scope, host: str, *, foreign: bool) -> Response | None:
        """Return the answer that refuses a request, or None if the request may be served."""
        method, api = scope["method"], scope["path"].startswith(f"{ROOT}/")
        allowed = ("GET", "HEAD", "POST", "OPTIONS") if api else ("GET", "HEAD")
        if method not in allowed:
            return PlainTextResponse(
                "only reading is allowed here\n",
                405,
                headers={"allow": ", ".join(allowed[:3] if api else allowed)},
            )
        probe = scope["path"] in PROBES  # a probe shows nothing about jobs, and must work under any host name
        if not probe and not self._authorizer.asks and not is_own_name(self._source, host):
            return PlainTextResponse(
                "open it as localhost, by its address or as coordinator.advertise\n", 421
            )
        if foreign and api:
            return PlainTextResponse("that is not a page of this cluster\n", 403)
        return None if api else self._page_refusal(scope)

    def _page_refusal(self, scope: Scope) -> Response | None:
        """Return the answer for a caller who may not see a page, or None if the caller may."""
        protected = _PROTECTED.match(scope["path"])
        if protected is None:
            return None
        try:
            self._authorizer.check_page(self._authorizer.caller(scope), protected["job"])
        except Unauthenticated as error:
            asks = {"www-authenticate": 'Basic realm="Strata: the token as password"'}
            return PlainTextResponse(f"{error.message}\n", 401, headers=asks)
        except StrataError as error:
            return PlainTextResponse(f"{error.message}\n", 403)
        return None
