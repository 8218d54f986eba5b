"""The address at which a replica serves, and how it dials its peers."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from strata.config import CoordinatorConfig
from strata.coordinator.rpc.server import Dialer, bind, server_options
from strata.core.timing import Timing
from strata.errors import ConfigError


@pytest.fixture
async def bound() -> AsyncIterator[Any]:
    """Yield a function that serves at an address and returns the port."""
    servers = []

    async def serve(listen: str) -> int:
        server = grpc.aio.server(options=server_options(Timing.derive(5.0), most_connections=100))
        servers.append(server)
        port = bind(server, CoordinatorConfig(listen=listen))
        await server.start()
        return port

    yield serve
    for server in servers:
        await server.stop(None)


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


async def test_a_replica_on_loopback_is_reached_at_both_its_addresses(bound: Any) -> None:
    port = await bound("127.0.0.1:0")
    assert [answers(host, port) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3


async def test_a_port_taken_on_ipv6_is_logged_and_ipv4_is_served(bound: Any) -> None:
    with socket.socket(socket.AF_INET6) as stranger, capture_logs() as logs:
        stranger.bind(("::1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        assert await bound(f"127.0.0.1:{port}") == port
        assert answers("127.0.0.1", port)
    assert [(e["event"], e["why"]) for e in logs] == [("serves_ipv4_only", "Address already in use")]


async def test_a_machine_without_ipv6_serves(bound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ipv4Only(socket.socket):
        def __init__(self, family: int = -1, *rest: Any, **more: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *rest, **more)

    monkeypatch.setattr(socket, "socket", Ipv4Only)
    with capture_logs() as logs:
        port = await bound("127.0.0.1:0")
    assert answers("127.0.0.1", port)
    assert "not supported" in logs[0]["why"]


@pytest.mark.parametrize("address", ["10.9.8.7:50051", "host2:50051", "[fd00::1]:50051"])
async def test_a_peer_elsewhere_is_not_spoken_to_in_plaintext(address: str) -> None:
    """In plaintext any process at that address would get this replica's token, and would be trusted."""
    dial = Dialer(CoordinatorConfig(), Timing.derive(5.0))
    with pytest.raises(ConfigError, match="the connection would be plaintext"):
        async with dial(address):
            pass
