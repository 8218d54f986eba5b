"""Connection limits on real sockets, and the effect of gRPC's own server arguments."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest
from structlog.testing import capture_logs

from strata.coordinator.access.connection_limiter import ConnectionLimiter, ConnectionReport, peer_of
from strata.coordinator.access.descriptors import Descriptors, raise_limit, shut
from strata.coordinator.rpc.server import server_options
from strata.core.access.connection_limits import Excess, Limits, Reason
from strata.core.timing import Timing
from tests.integration.abuse.attacker import ACK, PREFACE, SETTINGS, frame, settings
from tests.processes import LIMIT_S


class Port:
    """A listener on IPv4 and IPv6 loopback, and its accepted sockets."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self.number = self._listener.getsockname()[1]
        self.accepted: list[socket.socket] = []
        self.clients: list[socket.socket] = []

    def connect(self, host: str = "127.0.0.1") -> socket.socket:
        """Open a connection and return the client's socket."""
        client = socket.create_connection((host, self.number), timeout=LIMIT_S)
        self.clients.append(client)
        self.accepted.append(self._listener.accept()[0])
        return client

    def close(self) -> None:
        for each in (self._listener, *self.accepted, *self.clients):
            each.close()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_poll_reports_opened_and_closed_connections_only(port: Port) -> None:
    looking = Descriptors(port.number)
    assert looking.look().opened == []
    first, second = port.connect(), port.connect("::1")
    seen = looking.look()
    assert {each.peer for each in seen.opened} == {
        ("127.0.0.1", first.getsockname()[1]),
        ("::1", second.getsockname()[1]),
    }
    port.accepted[0].close()
    third = port.connect()  # reuses the descriptor of the first
    again = looking.look()
    assert [each.peer[1] for each in again.closed] == [first.getsockname()[1]]
    assert [each.peer[1] for each in again.opened] == [third.getsockname()[1]]


def test_shutting_a_connection_spares_a_new_one_at_the_same_descriptor(port: Port) -> None:
    looking = Descriptors(port.number)
    first = port.connect()
    (found,) = looking.look().opened
    assert shut(found)
    assert not is_open(first)
    assert port.accepted[0].recv(1) == b"", "its owner reads the end"
    second = port.connect()
    os.dup2(port.accepted[1].fileno(), found.descriptor)
    assert not shut(found)
    assert is_open(second)
    port.accepted[0].close()
    assert not shut(found)


class Callers:
    """Addresses of admitted and refused callers, as a test sets them."""

    def __init__(self) -> None:
        self.admitted_peers: set[str] = set()
        self.refused_peers: set[str] = set()

    def admitted(self) -> set[str]:
        return self.admitted_peers

    def refused(self) -> set[str]:
        peers, self.refused_peers = self.refused_peers, set()
        return peers


async def test_without_a_free_descriptor_a_connection_is_closed_by_a_later_poll(port: Port) -> None:
    limits = Limits(most=100, per_address=100, strangers=100, stranger_s=0.0)
    limiter = ConnectionLimiter(port.number, limits, ConnectionReport(), Callers())
    stranger = port.connect()
    await limiter.look()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        await limiter.look()
        assert is_open(stranger)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await asyncio.sleep(0.01)
    await limiter.look()
    assert not is_open(stranger)


async def test_a_peer_refused_for_its_certificate_is_closed_on_the_next_poll(port: Port) -> None:
    callers, report = Callers(), ConnectionReport()
    limits = Limits(most=100, per_address=100, strangers=100, stranger_s=100.0)
    limiter = ConnectionLimiter(port.number, limits, report, callers)
    refused, other = port.connect(), port.connect()
    callers.refused_peers = {f"ipv4:127.0.0.1:{refused.getsockname()[1]}", "ipv4:127.0.0.1:1"}
    await limiter.look()
    assert is_open(refused)
    await limiter.look()
    assert [is_open(each) for each in (refused, other)] == [False, True]
    assert report.closed.children["grpc", "certificate"].value == 1


async def test_unadmitted_connections_are_closed_and_admitted_ones_stay(port: Port) -> None:
    callers = Callers()
    report = ConnectionReport()
    limits = Limits(most=100, per_address=100, strangers=2, stranger_s=0.0)
    limiter = ConnectionLimiter(port.number, limits, report, callers)
    known, stranger, other = port.connect(), port.connect(), port.connect("::1")
    callers.admitted_peers |= {
        f"ipv4:127.0.0.1:{known.getsockname()[1]}",
        f"ipv6:%5B::1%5D:{other.getsockname()[1]}",
        "ipv4:127.0.0.1:1",
        "unix:",
    }
    with capture_logs() as logged:
        await limiter.look()
        await asyncio.sleep(0.01)
        await limiter.look()
    assert [is_open(each) for each in (known, stranger, other)] == [True, False, True]
    assert report.open == {"grpc": 2}
    assert report.closed.children["grpc", "unadmitted"].value == 1
    (line,) = logged
    assert (line["event"], line["most_from"]) == ("connections_closed", "127.0.0.1")


def test_closed_connections_are_logged_at_most_once_a_minute(port: Port) -> None:
    report = ConnectionReport()
    excess = [Excess(connection=1, address="10.0.0.7", reason=Reason.ALL)]
    with capture_logs() as logged:
        for now_s in (1.0, 2.0, 60.9, 61.0, 62.0):
            report.report_closed("http", excess, now_s)
    assert [line["counts"] for line in logged] == [{"http all": 1}, {"http all": 3}]
    assert report.closed.children["http", "all"].value == 5


def test_grpc_peer_names_are_parsed() -> None:
    assert peer_of("ipv4:10.0.0.7:40312") == ("10.0.0.7", 40312)
    assert peer_of("ipv6:%5B::1%5D:40312") == ("::1", 40312)
    assert peer_of("ipv6:%5Bfe80::1%252%5D:5") == ("fe80::1", 5)
    assert peer_of("unix:") == ("", 0)


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        with capture_logs() as logged:
            assert raise_limit() == raise_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
        assert [line["event"] for line in logged] == ["descriptor_limit_raised"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# -- gRPC's own arguments, with small values: these tests fail if an update of gRPC drops one of them


@asynccontextmanager
async def serving(**replaced: int) -> AsyncIterator[int]:
    options = dict(server_options(Timing.derive(5.0), most_connections=100))
    small = {f"grpc.{name}": value for name, value in replaced.items()}
    assert small.keys() <= options.keys(), "the replica does not set it"
    server = grpc.aio.server(options=list({**options, **small}.items()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes received until the end of the connection."""
    async with asyncio.timeout(LIMIT_S):
        return await reader.read()


@pytest.mark.parametrize("printed", [b"", PREFACE], ids=["silence", "preface"])
async def test_a_handshake_that_never_finishes_is_ended(printed: bytes) -> None:
    async with serving(server_handshake_timeout_ms=300) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(printed)
        await ended(reader)
        writer.close()


async def test_an_idle_connection_without_a_stream_gets_a_goaway() -> None:
    async with serving(max_connection_idle_ms=300) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + settings() + frame(SETTINGS, ACK, 0))
        goaway = 7
        async with asyncio.timeout(LIMIT_S):
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3]))
                if head[3] == goaway:
                    break
        writer.close()


async def test_a_client_receives_the_stream_limit() -> None:
    async with serving(max_concurrent_streams=7) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + settings())
        async with asyncio.timeout(LIMIT_S):
            head = await reader.readexactly(9)
            body = await reader.readexactly(int.from_bytes(head[:3]))
        assert head[3] == SETTINGS
        values = {
            int.from_bytes(body[i : i + 2]): int.from_bytes(body[i + 2 : i + 6])
            for i in range(0, len(body), 6)
        }
        assert values[3] == 7
        writer.close()


async def test_a_connection_above_the_limit_is_not_accepted() -> None:
    async with serving(max_allowed_incoming_connections=2) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _reader, writer in held:
            writer.write(PREFACE + settings())
        for reader, _writer in held:
            async with asyncio.timeout(LIMIT_S):
                assert await reader.readexactly(9)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionResetError):
            assert await ended(reader) == b""
        for _reader, each in (*held, (reader, writer)):
            each.close()
