"""A TCP forwarder to etcd that can silently drop all traffic, like a network partition."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


class Gate:
    """A TCP forwarder to one target; it listens at `address`."""

    def __init__(self, target: str) -> None:
        url = urlsplit(target if "//" in target else f"//{target}")
        assert url.hostname is not None
        assert url.port is not None
        self._host, self._port = url.hostname, url.port
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._passed_bytes = 0
        self._limit_bytes: int | None = None
        self.has_shut = asyncio.Event()
        """Set once the limit of `shut_after` has stopped the traffic."""
        self.address = ""

    def shut(self) -> None:
        """Stop all traffic silently; connections stay open."""
        self._open.clear()

    def shut_after(self, count: int) -> None:
        """Stop all traffic once `count` bytes have passed in both directions together."""
        self._limit_bytes = count

    def open(self) -> None:
        """Forward traffic again, including the bytes received meanwhile."""
        self._open.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                self._passed_bytes += len(data)
                if self._limit_bytes is not None and self._passed_bytes > self._limit_bytes:
                    self.shut()
                    self.has_shut.set()
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def gated(target: str) -> AsyncIterator[Gate]:
    """Run a forwarder to `target` while the body runs."""
    gate = Gate(target)
    await gate.start()
    try:
        yield gate
    finally:
        await gate.stop()
