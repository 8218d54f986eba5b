"""HTTP API streams on sockets: the replica cuts off a client that stops reading, and serves the others as before."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
import time
from collections.abc import AsyncIterator

import pytest

from strata.coordinator.access.connection_limiter import ConnectionReport
from strata.core.access.connection_limits import shares
from strata.dashboard.api.stream import SEND_S
from strata.dashboard.app import make_app
from strata.dashboard.server import HttpServer
from tests.unit.dashboard.rig import Shown, anybody

JOBS = 8
RANKS = 1000
FILL_S = 20.0
"""Time to fill the kernel's buffers of megabytes before the connection blocks."""
SHARES = shares(descriptors=4096, most=1000, per_address=1000)


@contextlib.asynccontextmanager
async def served(shown: Shown) -> AsyncIterator[tuple[str, int]]:
    """Serve a replica's HTTP side as `strata coordinator` does on loopback; yield its address."""
    server = HttpServer(
        make_app(shown, authorizer=anybody()),
        "127.0.0.1:0",
        advertised_host="127.0.0.1",
        shares=SHARES,
        report=ConnectionReport(),
    )
    host, _, port = (await server.start()).rpartition(":")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run())
        yield host, int(port)
        await server.stop()


def stuck(address: tuple[str, int], paths: list[str]) -> socket.socket:
    """Request a stream and never read from it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(address)
    query = "&".join(f"watch={path}" for path in paths)
    made.sendall(f"GET /api/v1/stream?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return made


def reset_within(connection: socket.socket, limit_s: float) -> bool:
    """Return True if the server aborts this unread connection within the limit."""
    poll = select.poll()
    poll.register(connection, 0)  # reports errors and hang-ups only
    return any(what & (select.POLLERR | select.POLLHUP) for _fd, what in poll.poll(1000 * limit_s))


@pytest.mark.slow
async def test_a_reader_that_is_stuck_is_cut_off_and_others_are_served() -> None:
    shown = Shown()
    shown.lead()
    for job in range(JOBS):
        shown.job(f"job-{job}", members=RANKS // 8, slots=8)
        for rank in range(RANKS):
            shown.say(f"job-{job}", rank, 5, "step")
    async with served(shown) as address:
        began_s = time.monotonic()
        connection = stuck(address, [f"/jobs/job-{job}/ranks" for job in range(JOBS)])
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /api/v1/stream?watch=/cluster HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received_at: list[float] = []

        async def listen() -> None:
            while await reader.read(1 << 16):
                received_at.append(time.monotonic())

        listening = asyncio.create_task(listen())
        try:
            assert await asyncio.to_thread(reset_within, connection, FILL_S + SEND_S + 2)
            took_s = time.monotonic() - began_s
            assert took_s > SEND_S, "it may be slow for so long"
            await asyncio.sleep(2)
        finally:
            connection.close()
            listening.cancel()
            writer.transport.abort()
    gaps = [after - before for before, after in itertools.pairwise(received_at)]
    assert len(received_at) > took_s - 2
    # a larger gap means that the other stream waited for the stuck one
    assert max(gaps) < SEND_S / 2, "the other stream went on"
