"""The ASGI application: which path shows what, and what every answer carries.

Only actions of the API change anything. Answers are never cached by others, and tell the browser to load nothing from
anywhere and to run no script but ours. On loopback only a Host that is an address or `localhost` is
answered, so that a page of somebody else's cannot read this one under a name of its own.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.config import is_loopback, split_address
from strata.core.records import PoisonRecord
from strata.dashboard.api.routes import ROOT, Api
from strata.dashboard.authorizer import OPEN, HttpAuthorizer
from strata.dashboard.exposition import Exposition
from strata.dashboard.html import tag
from strata.dashboard.job import JobDetail, job_detail
from strata.dashboard.layout import POLICY
from strata.dashboard.origins import PREFLIGHT, allowing, is_known
from strata.dashboard.pages import cluster_page, job_page, missing_page
from strata.dashboard.plain import PlainPages
from strata.dashboard.source import Source
from strata.dashboard.status import ClusterStatus, as_json, cluster_status
from strata.errors import InvalidArgument, StrataError, Unauthenticated
from strata.observe.words import printable

AGAIN_S: Final = 1.0
"""How long a page stays as it was made; it costs the replica's loop a few milliseconds."""
MAX_KEPT: Final = 64
_JOB_PATH: Final = re.compile(r"/(?:(?:api/)?jobs|status)/([^/]*)")

Draw = Callable[[], Response]
"""Makes an answer of what was seen; touches nothing of the replica, so any thread may do it."""

_NO_JOB: Final = (
    "There is no job of that name. A job begins with its first member: see all ",
    tag("a", "jobs", href="/"),
    ".",
)

HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def make_app(source: Source, *, listen: str, authorizer: HttpAuthorizer) -> ASGIApp:
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

    pages, plain = _Pages(source), PlainPages(source)
    routes = [
        Route("/", pages.cluster),
        Route("/jobs/{job}", pages.job),
        Route("/status", plain.answer),
        Route("/status/{job}", plain.answer),
        Route("/api/status", pages.cluster_json),
        Route("/api/jobs/{job}", pages.job_json),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        *Api(source, authorizer).routes(),
    ]
    host, _port = split_address("coordinator.http_listen", listen)
    return _Guard(Starlette(routes=routes), source, authorizer, names_only_loopback=is_loopback(host))


class _Pages:
    """Makes the pages and their JSON, each at most once in `AGAIN_S`, however many look."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._made: dict[tuple[str, str, int], tuple[float, Response]] = {}
        self._drawing = asyncio.Lock()

    async def cluster(self, _request: Request) -> Response:
        return await self._kept(("page", "", 0), lambda: self._cluster(_cluster_html))

    async def cluster_json(self, _request: Request) -> Response:
        return await self._kept(("json", "", 0), lambda: self._cluster(_json))

    async def job(self, request: Request) -> Response:
        name, number = request.path_params["job"], _number(request.query_params.get("page", ""))
        return await self._kept(("page", name, number), lambda: self._job_page(name, number))

    async def job_json(self, request: Request) -> Response:
        name, number = request.path_params["job"], _number(request.query_params.get("page", ""))
        return await self._kept(("json", name, number), lambda: self._job_json(name, number))

    # -- looking: in the loop, so that what is seen is of one moment; drawing can be done elsewhere

    async def _cluster(self, draw: Callable[[ClusterStatus], Response]) -> Draw:
        status = cluster_status(self._source, await self._source.etcd_members())
        return lambda: draw(status)

    async def _job_page(self, name: str, number: int) -> Draw:
        frame = cluster_status(self._source, (), with_jobs=False)
        try:
            detail = self._detail(name, number)
        except PoisonRecord as error:
            message = error.message
            return lambda: _html(missing_page(frame, name, message), 500)
        if detail is None:
            return lambda: _html(missing_page(frame, "No such job", *_NO_JOB), 404)
        found = detail
        return lambda: _html(job_page(frame, found))

    async def _job_json(self, name: str, number: int) -> Draw:
        try:
            detail = self._detail(name, number)
        except PoisonRecord as error:
            body, code = {"error": error.message}, 500
            return lambda: JSONResponse(body, code)
        if detail is None:
            return lambda: JSONResponse({"error": f"no job {printable(name)[:128]} exists"}, 404)
        found = detail
        return lambda: _json(found)

    def _detail(self, name: str, number: int) -> JobDetail | None:
        try:
            return job_detail(self._source, name, number)
        except InvalidArgument:  # no name that a job could have
            return None

    async def _kept(self, key: tuple[str, str, int], look: Callable[[], Awaitable[Draw]]) -> Response:
        async with self._drawing:  # one at a time: many that look at once wait for the first
            now = asyncio.get_running_loop().time()
            held = self._made.get(key)
            if held is not None and now - held[0] < AGAIN_S:
                return held[1]
            # a thousand ranks take tens of milliseconds to draw, which no barrier shall wait for
            response = await asyncio.to_thread(await look())
            self._made = {k: v for k, v in self._made.items() if now - v[0] < AGAIN_S}
            if len(self._made) < MAX_KEPT:
                self._made[key] = (now, response)
            return response


def _json(status: ClusterStatus | JobDetail) -> Response:
    return JSONResponse(as_json(status))


def _cluster_html(status: ClusterStatus) -> Response:
    return _html(cluster_page(status))


def _html(body: str, code: int = 200) -> Response:
    return HTMLResponse(body, code, headers={"content-security-policy": POLICY})


def _number(text: str) -> int:
    """Return the page that is asked for; the first one for what is no number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 7 else 1


class _Guard:
    """Refuses what is not for us, and adds to every answer what every answer carries."""

    def __init__(
        self, app: ASGIApp, source: Source, authorizer: HttpAuthorizer, *, names_only_loopback: bool
    ) -> None:
        self._app = app
        self._source = source
        self._authorizer = authorizer
        self._names_only_loopback = names_only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        origin, host = headers.get(b"origin", ""), headers.get(b"host", "")
        known = bool(origin) and is_known(self._source, origin, host)
        also = [*HEADERS, *(allowing(origin) if known else ())]

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *also]
            await send(message)

        answer = self._refusal(scope, host, foreign=bool(origin) and not known)
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
        if self._names_only_loopback and not _is_local(host):
            return PlainTextResponse("open it as localhost, or by its address\n", 421)
        if foreign and method in ("POST", "OPTIONS"):
            return PlainTextResponse("that is not a page of this cluster\n", 403)
        return None if api else self._page_refusal(scope)

    def _page_refusal(self, scope: Scope) -> Response | None:
        """Return the answer to somebody who may not look at a page."""
        if scope["path"] in OPEN:
            return None
        job = _JOB_PATH.match(scope["path"])
        try:
            self._authorizer.check_page(self._authorizer.caller(scope), job[1] if job else None)
        except Unauthenticated as error:
            asks = {"www-authenticate": 'Basic realm="Strata: the token as password"'}
            return PlainTextResponse(f"{error.message}\n", 401, headers=asks)
        except StrataError as error:
            return PlainTextResponse(f"{error.message}\n", 403)
        return None


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
