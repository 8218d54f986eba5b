"""The HTTP API's routes: resources, the stream, actions, and their schema."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import cache
from importlib import resources as files
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from strata.core.access.authority import Identity
from strata.dashboard.api import model
from strata.dashboard.api.actions import HEADER, MAX_BODY, act
from strata.dashboard.api.resources import Resource, Resources, problem
from strata.dashboard.api.stream import Streams
from strata.dashboard.authorizer import HttpAuthorizer
from strata.dashboard.source import Source
from strata.errors import InvalidArgument, PermissionDenied, StrataError

ROOT: Final = "/api/v1"
JSON: Final = "application/json"
CERTIFIED_S: Final = 60.0
"""The longest stream of a caller with a client certificate: the next TLS handshake verifies the certificate again."""


class Api:
    """The API of one replica, as routes of its application."""

    def __init__(self, source: Source, authorizer: HttpAuthorizer) -> None:
        self._source = source
        self._authorizer = authorizer
        self._resources = Resources(source)
        self._streams = Streams(source=source, resources=self._resources)

    def routes(self) -> list[BaseRoute]:
        """Return the routes; the last route matches every path below `ROOT` that no other route matches."""
        return [
            Route(f"{ROOT}/me", self._answered(self._me)),
            Route(f"{ROOT}/openapi.json", self._answered(_schema)),
            Route(f"{ROOT}/stream", _Asgi(self._stream)),
            Route(
                f"{ROOT}/jobs/{{job}}/checkpoints/{{step:int}}/{{action}}",
                self._answered(self._act),
                methods=["POST"],
            ),
            Route(f"{ROOT}/{{path:path}}", self._answered(self._get)),
        ]

    def _answered(
        self, make: Callable[[Request, Identity | None], Awaitable[bytes]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Answer with the bytes that `make` returns, or with the error that it raises."""

        async def answer(request: Request) -> Response:
            try:
                return Response(await make(request, self._authorizer.caller(request.scope)), media_type=JSON)
            except StrataError as error:
                code, body = problem(error)
                return Response(body, code, media_type=JSON)

        return answer

    async def _me(self, _request: Request, identity: Identity | None) -> bytes:
        me = model.Me(
            identity=identity.id if identity is not None else "",
            role=identity.role.value if identity is not None else "",
            jobs=tuple(sorted(identity.jobs)) if identity is not None else (),
            may_operate=self._authorizer.may_operate(identity),
            takes_tokens=self._authorizer.takes_tokens,
            cluster=self._source.keys.cluster,
            replica=self._source.replica,
            version=self._source.version,
        )
        return msgspec.json.encode(me)

    async def _get(self, request: Request, identity: Identity | None) -> bytes:
        query = f"?{request.url.query}" if request.url.query else ""
        path = request.scope["path"].removeprefix(ROOT)
        return (await self._resources.body(self._find(identity, f"{path}{query}"))).json

    def _find(self, identity: Identity | None, path: str) -> Resource:
        """Return the resource that a path names, if the caller may read it."""
        limited = identity.jobs if identity is not None else frozenset[str]()
        found = self._resources.find(path, limited)
        self._authorizer.check(identity, found.job)
        return found

    async def _act(self, request: Request, identity: Identity | None) -> bytes:
        if HEADER not in dict(request.scope["headers"]):
            raise PermissionDenied("an action needs the header X-Strata-Action", hint="X-Strata-Action: 1")
        self._authorizer.check_operates(identity)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY:
                raise InvalidArgument(f"the body of an action has at most {MAX_BODY} bytes")
        where = request.path_params
        done = await act(self._source, identity, where["job"], where["step"], where["action"], bytes(body))
        return msgspec.json.encode(done)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        def find(path: str) -> Resource:
            return self._find(self._authorizer.caller(scope), path)

        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._streams.serve(
                scope,
                receive,
                sending,
                find=find,
                exempt=scope.get("state", {}).get("stays", _as_others),
                end=scope.get("state", {}).get("end", _as_others),
                review_s=self._authorizer.review_s,
                longest_s=CERTIFIED_S if scope.get("state", {}).get("uris") else math.inf,
            )
        except StrataError as error:
            if not begun:
                code, body = problem(error)
                await Response(body, code, media_type=JSON)(scope, receive, send)
            # after its first bytes a stream only ends; the client gets the error when it reconnects


class _Asgi:
    """Wraps an ASGI application so that a route passes it requests unchanged."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _as_others() -> None:
    """Stand in for `exempt` and `end`, with no effect, if another server runs the application and limits
    connections itself.
    """


async def _schema(_request: Request, _identity: Identity | None) -> bytes:
    return schema()


@cache
def schema() -> bytes:
    """Return the generated OpenAPI document of this API."""
    return files.files(__package__).joinpath("openapi.json").read_bytes()
