"""Static files of the dashboard, built from `web/`: a single page, served at every address in `PAGES`, and its assets.

The files contain nothing about jobs, so every client may load them; the page requests its data from the API.
"""

from __future__ import annotations

import gzip
import mimetypes
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from strata.dashboard.origins import peers
from strata.dashboard.source import Source

FOLDER: Final = "bundle"
PAGES: Final = ("/", "/cluster", "/events", "/jobs", "/jobs/{path:path}")
"""The addresses that the dashboard's page serves."""
KEPT: Final = "public, max-age=31536000, immutable"
"""An asset's name changes with its content, so a browser may cache the asset for ever."""


class Bundle:
    """Serves the dashboard's files, which are read once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        folder = resources.files("strata.dashboard").joinpath(FOLDER)
        self._index = _read(folder.joinpath("index.html"))
        assets = folder.joinpath("assets")
        self._zipped: dict[str, bytes] = {}
        self._assets = {each.name: each.read_bytes() for each in assets.iterdir()} if assets.is_dir() else {}

    def routes(self) -> list[BaseRoute]:
        """Return the routes of the page and its assets."""
        return [
            *(Route(path, self._page) for path in PAGES),
            Route("/assets/{name}", self._asset),
        ]

    async def _page(self, _request: Request) -> Response:
        if self._index is None:
            return RedirectResponse("/status")  # a source tree without a built dashboard
        return Response(
            self._index,
            media_type="text/html; charset=utf-8",
            headers={"content-security-policy": self._policy()},
        )

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        body = self._assets.get(name)
        if body is None:
            return PlainTextResponse("there is no such file\n", 404)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        headers = {"cache-control": KEPT, "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            body = self._zipped[name] = self._zipped.get(name) or gzip.compress(body, mtime=0)
        return Response(body, media_type=kind, headers=headers)

    def _policy(self) -> str:
        """Allow our own script and style, and requests to this replica and its peers; nothing else."""
        connect = " ".join(["'self'", *sorted(set(peers(self._source)))])
        return (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
            f" connect-src {connect}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )


def _read(file: Traversable) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
