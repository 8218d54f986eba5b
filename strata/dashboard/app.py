"""The ASGI application: which path shows what, and what every answer carries.

Only actions of the API change anything. Answers are never cached by others, and tell the browser to load nothing from
anywhere and to run no script but ours. Where nobody has to show a credential, only a Host that is an address, `localhost`
or a replica's own name is answered, so that a page of somebody else's cannot read this one under a name of its own.
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
"""What tells of the cluster or of a job, besides the API, which looks itself who calls."""

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
    """Refuses what is not for us, and adds to every answer what every answer carries."""

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
        """Return the answer to a request that is not served."""
        method, api = scope["method"], scope["path"].startswith(f"{ROOT}/")
        allowed = ("GET", "HEAD", "POST", "OPTIONS") if api else ("GET", "HEAD")
        if method not in allowed:
            return PlainTextResponse(
                "this only shows things\n", 405, headers={"allow": ", ".join(allowed[:3] if api else allowed)}
            )
        probe = scope["path"] in PROBES  # says nothing that a page could want, and must not fail for a name
        if not probe and not self._authorizer.asks and not is_own_name(self._source, host):
            return PlainTextResponse(
                "open it as localhost, by its address or as coordinator.advertise\n", 421
            )
        if foreign and api:
            return PlainTextResponse("that is not a page of this cluster\n", 403)
        return None if api else self._page_refusal(scope)

    def _page_refusal(self, scope: Scope) -> Response | None:
        """Return the answer to somebody who may not look at a page."""
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
