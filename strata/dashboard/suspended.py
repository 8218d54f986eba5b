"""The HTTP application of a suspended replica: healthy, but not ready; all other paths answer with the reason."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp


def make_suspended_app(reason: Callable[[], str]) -> ASGIApp:
    """Return the application. It shows nothing about jobs, so it requires no credential."""

    async def healthz(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def why(_request: Request) -> Response:
        return PlainTextResponse(
            f"{reason()}\n", 503, headers={"cache-control": "no-store", "retry-after": "5"}
        )

    return Starlette(routes=[Route("/healthz", healthz), Route("/{path:path}", why)])
