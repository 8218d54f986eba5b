"""The HTTP server of a replica: uvicorn on the replica's own event loop, with limits on connections and requests.

The same loop serves barriers, so HTTP clients must not be able to block the loop:

- A connection lives for at most `CONNECTION_S`, counted from its accept, before the TLS handshake. The API's streams
  are exempt; there are at most `api.stream.MAX_STREAMS` of them. Above the limits the server closes the oldest
  connection of the address with the most connections, so probes are answered however many connections other clients
  have. The gRPC port has the same rule (`core.access.connection_limits`).
- A request's head is bounded. The server reads only bodies of actions, which are bounded too (`api.routes`).
- Each page is rendered at most once a second (`app`).

uvicorn's own signal handlers are not installed, because the replica handles signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from strata.config import split_address
from strata.coordinator.access.connection_limiter import POLL_S, ConnectionReport
from strata.core.access.connection_limits import Connections, Shares, address_key
from strata.errors import ConfigError
from strata.observe import get_logger

log = get_logger()

BACKLOG: Final = 1024
ACCEPTS: Final = 32
"""Connections accepted in one turn of the loop."""
PAUSE_S: Final = 0.1
SHORT_OF: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
NO_LINGER: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds: closing the socket drops unsent data, and the peer receives a reset."""
HELLO_BYTES: Final = 64
"""Minimal length of a TLS client's first message."""
CONNECTION_S: Final = 15.0
"""Longer than any answer takes; a browser or a scraper then opens another connection."""
HEAD_BYTES: Final = 16 * 1024
HANDSHAKE_S: Final = 5.0
DATE_S: Final = 1.0
STOP_S: Final = 1
"""How long answers in progress may take to finish when the replica stops."""


class HttpServer:
    """Serves `app` at `listen` (`host:port`, 0 for a free port); a `Serving`."""

    def __init__(
        self,
        app: ASGIApp,
        listen: str,
        *,
        advertised_host: str,
        shares: Shares,
        report: ConnectionReport,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Set up the server; `advertised_host` is the host to publish if `listen` is a wildcard address."""
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
            shares,
            report,
        )
        self._ended = asyncio.Event()
        self._begun = False

    async def start(self) -> str:
        """Bind the port, and return the address, with the scheme if it is https.

        Connections then queue until `run`. Raise `ConfigError` if the port is in use, or if the address does not
        belong to this machine.
        """
        host, _port = split_address("coordinator.http_listen", self._listen)
        self._server.listener = _bound(self._listen)
        port = self._server.listener.getsockname()[1]
        if host in ("0.0.0.0", "::"):  # noqa: S104  # compared with the configured host, nothing is bound
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
        """Accept no new connection, end the open ones, close the port."""
        self._server.should_exit = True
        self._server.stopping.set()
        if self._begun:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * STOP_S):
                    await self._ended.wait()
        self._server.release()  # a `run` that was cancelled did not release
        if self._server.listener is not None:
            self._server.listener.close()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, on a socket that is bound already."""

    def __init__(
        self, config: uvicorn.Config, tls: ssl.SSLContext | None, shares: Shares, report: ConnectionReport
    ) -> None:
        super().__init__(config)
        self.listener: socket.socket | None = None
        self._tls = tls
        self._silent: Connections[_Connection] = Connections(shares.http_silent)
        self._speaking: Connections[_Connection] = Connections(shares.http_speaking)
        self._report = report
        self._looking: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Renew the Date header once a second until `stopping` is set. uvicorn's own loop wakes ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self.stopping.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections ourselves, to limit them before their TLS handshake.

        uvicorn lets a handshake take a minute, and asyncio reports a connection only after its handshake.
        """
        assert self.listener is not None, "start comes before run"
        self.servers = []
        asyncio.get_running_loop().add_reader(self.listener, self._accept, self.listener)
        self._looking = asyncio.create_task(self._look())
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and end the open connections."""
        assert self.listener is not None, "it was started"
        assert self._looking is not None, "it was started"
        asyncio.get_running_loop().remove_reader(self.listener)
        await super().shutdown(sockets)
        ending = (self._looking, *self._tasks)
        self.release()
        await asyncio.gather(*ending, return_exceptions=True)

    def release(self) -> None:
        """Stop reading the listener, and end every connection now. uvloop closes no socket that it still reads."""
        if self.listener is not None and self.listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.listener)
        if self._looking is not None:
            self._looking.cancel()
        for task in self._tasks:
            task.cancel()
        for connection in (*self._silent.all(), *self._speaking.all()):
            self._end(connection)

    def _accept(self, listener: socket.socket) -> None:
        """Accept at most `ACCEPTS` waiting connections, so that the loop also serves the open connections."""
        now_s = asyncio.get_running_loop().time()
        for _ in range(ACCEPTS):
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                return  # no connection waits
            except OSError as error:
                if error.errno in SHORT_OF:
                    self._pause(listener)
                    return
                continue  # the client disconnected already
            accepted.setblocking(False)
            connection = _Connection(accepted, address_key(address[0]))
            self._silent.opened(connection, connection.address, now_s)
            connection.wait(HELLO_BYTES if self._tls else 1, self._begin, self._end)
            self._close_excess(self._silent)

    def _pause(self, listener: socket.socket) -> None:
        """Accept nothing for `PAUSE_S`: the listener stays readable, so the loop would spin."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)

        def again() -> None:
            if not self.should_exit:
                loop.add_reader(listener, self._accept, listener)

        loop.call_later(PAUSE_S, again)

    def _begin(self, connection: _Connection) -> None:
        connection.wait_no_more()
        self._silent.closed(connection)
        self._speaking.opened(connection, connection.address, asyncio.get_running_loop().time())
        self._close_excess(self._speaking)
        task = asyncio.create_task(self._run_connection(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, connection: _Connection) -> None:
        connection.cut()
        self._silent.closed(connection)
        self._speaking.closed(connection)

    async def _look(self) -> None:
        while True:
            self._report.open["http"] = len(self._silent) + len(self._speaking)
            await asyncio.sleep(POLL_S)

    def _close_excess(self, connections: Connections[_Connection]) -> None:
        now_s = asyncio.get_running_loop().time()
        excess = connections.excess(now_s)
        for each in excess:
            self._end(each.connection)
        self._report.report_closed("http", excess, now_s)

    async def _run_connection(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        protocol = _Bounded(config=self.config, server_state=self.server_state, app_state={})
        end = loop.call_later(CONNECTION_S, self._end, connection)

        def exempt() -> None:
            end.cancel()
            self._speaking.admitted(connection)

        protocol.exempt = exempt
        try:
            await loop.connect_accepted_socket(
                lambda: protocol,
                connection.socket,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
            )
            await protocol.ended.wait()
        except OSError:
            pass  # the handshake failed or timed out
        finally:
            end.cancel()
            self._end(connection)
            connection.socket.close()


class _Connection:
    """An accepted connection. Until the peer sends something, the connection costs little more than a descriptor."""

    def __init__(self, accepted: socket.socket, address: str) -> None:
        self.socket = accepted
        self.address = address
        self._silent: asyncio.TimerHandle | None = None

    def wait(self, count: int, begin: Callable[[Self], None], end: Callable[[Self], None]) -> None:
        """Call `begin` once `count` bytes or the stream's end arrive; call `end` if neither does in `HANDSHAKE_S`."""
        loop = asyncio.get_running_loop()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
        self._silent = loop.call_later(HANDSHAKE_S, end, self)
        loop.add_reader(self.socket, begin, self)

    def wait_no_more(self) -> bool:
        """Stop waiting for the peer's first bytes; return whether the connection was still waiting."""
        if self._silent is None:
            return False
        self._silent.cancel()
        self._silent = None
        asyncio.get_running_loop().remove_reader(self.socket)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return True

    def cut(self) -> None:
        """End the connection as if the peer had ended it; a transport then closes the socket. A repeat does nothing."""
        if self.wait_no_more():
            self.socket.close()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class _Bounded(H11Protocol):
    """HTTP/1.1 protocol that puts the URIs of the client's certificate into the state of each request."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.ended = asyncio.Event()
        self.exempt: Callable[[], None] = lambda: None
        """Exempts the connection from `CONNECTION_S`, and from being closed to make space for new connections."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        secured = transport.get_extra_info("ssl_object")
        shown = secured.getpeercert() if secured is not None else None
        names = (shown or {}).get("subjectAltName", ())
        uris = [name for kind, name in names if kind == "URI"]
        self.app_state = {"uris": uris, "stays": lambda: self.exempt(), "end": lambda: _reset(transport)}  # noqa: PLW0108  # set later

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        super().connection_lost(exc)


def _reset(transport: Any) -> None:
    """Reset a connection immediately. The kernel drops unsent data, possibly megabytes if the peer does not read."""
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    transport.abort()


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
        made.listen(BACKLOG)
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
