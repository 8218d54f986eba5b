"""The HTTP server of a replica, inside the replica's own event loop.

That loop serves barriers, so whoever comes over HTTP must not be able to hold it up:

- a connection lives for `CONNECTION_S` at most, whatever it does or does not send, and at most
  `MAX_CONNECTIONS` are open, `MAX_PER_ADDRESS` from one address; one more takes an older one's place, so
  that a probe is answered whatever others hold (`crowd`);
- a request's head is bounded, bodies are not read, and only GET and HEAD are answered (`app`);
- what is shown is made at most once a second for each page (`app`).

uvicorn would take over the process's signals; here they belong to the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from strata.config import split_address
from strata.dashboard.crowd import Crowd
from strata.errors import ConfigError
from strata.observe import get_logger

log = get_logger()

MAX_CONNECTIONS: Final = 64
MAX_PER_ADDRESS: Final = 16
CONNECTION_S: Final = 15.0
"""Longer than any answer takes; a browser or a scraper opens another connection."""
HEAD_BYTES: Final = 16 * 1024
HANDSHAKE_S: Final = 5.0
STOP_S: Final = 1
"""How long answers that are under way may take when the replica stops."""


class HttpServer:
    """Serves `app` at `listen` (`host:port`, 0 for a free port); a `Serving`."""

    def __init__(
        self, app: ASGIApp, listen: str, *, advertised_host: str, tls: ssl.SSLContext | None = None
    ) -> None:
        """`advertised_host` is what others are told where `listen` names every address."""
        self._listen = listen
        self._advertised_host = advertised_host
        self._tls = tls
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Bounded,
                ws="none",
                loop="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=HEAD_BYTES,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=STOP_S,
            ),
            tls,
        )
        self._ended = asyncio.Event()
        self._begun = False

    async def start(self) -> str:
        """Bind, and return the address, with its scheme if that is https.

        From now on connections wait to be served.

        `ConfigError` when the port is taken or the address is not this machine's.
        """
        host, _port = split_address("coordinator.http_listen", self._listen)
        self._server.listener = _bound(self._listen)
        port = self._server.listener.getsockname()[1]
        if host in ("0.0.0.0", "::"):  # noqa: S104  # what it was told, not what it binds
            host = self._advertised_host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("http_serves", url=f"{'https' if self._tls else 'http'}://{address}/")
        return f"https://{address}" if self._tls else address

    async def run(self) -> None:
        """Serve until `stop`."""
        self._begun = True
        try:
            await self._server.serve()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Take no new connection, end those there are, close the port."""
        self._server.should_exit = True
        if self._begun:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * STOP_S):
                    await self._ended.wait()
        if self._server.listener is not None:
            self._server.listener.close()


class _Server(uvicorn.Server):
    """uvicorn's server on a socket that is bound already, with its hands off the signals."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.listener: socket.socket | None = None
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn's own gives a TLS handshake a minute, before any limit of ours holds."""
        assert self.listener is not None, "start comes before run"

        crowd: Crowd[asyncio.Transport] = Crowd(most=MAX_CONNECTIONS, per_address=MAX_PER_ADDRESS)

        def protocol() -> asyncio.Protocol:
            made = _Bounded(config=self.config, server_state=self.server_state, app_state={})
            made.crowd = crowd
            return made

        self.servers = [
            await asyncio.get_running_loop().create_server(
                protocol,
                sock=self.listener,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
                backlog=MAX_CONNECTIONS,
            )
        ]
        self.started = True


class _Bounded(H11Protocol):
    """A connection that ends. Requests carry in their state who the client's certificate says it is."""

    crowd: Crowd[asyncio.Transport]
    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        secured = transport.get_extra_info("ssl_object")
        shown = secured.getpeercert() if secured is not None else None
        names = (shown or {}).get("subjectAltName", ())
        self.app_state = {"uris": [name for kind, name in names if kind == "URI"]}
        peer = transport.get_extra_info("peername")
        gone = self.crowd.enter(transport, peer[0] if peer else "")
        if gone is not None:
            gone.abort()
        self._end = self.loop.call_later(CONNECTION_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        self.crowd.leave(self.transport)
        super().connection_lost(exc)


def _bound(address: str) -> socket.socket:
    host, port = split_address("coordinator.http_listen", address)
    try:
        family, kind, protocol, _name, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot serve HTTP at {address}: {_words(error)}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(MAX_CONNECTIONS)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"cannot serve HTTP at {address}: {_words(error)}",
            hint='pass another address with --http, or --http "" to serve no HTTP',
        ) from None
    made.setblocking(False)
    return made


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
