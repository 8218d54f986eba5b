"""The address at which other nodes reach this node."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from strata.agent.addresses import address_towards, find_route_towards
from strata.client import parse_endpoints


@pytest.mark.parametrize(
    ("endpoint", "address"), [("127.0.0.1", "127.0.0.1"), ("http://[::1]:50051", "::1"), ("127.0.0.2:7", "")]
)
def test_a_ranks_address_is_the_source_of_the_route_to_the_coordinators(endpoint: str, address: str) -> None:
    to = parse_endpoints(endpoint)[0]
    found = address_towards(to.host, to.port)
    assert found == address or (not address and found.startswith("127."))


@pytest.mark.parametrize("host", ["no-such-host.invalid", ""])
def test_without_a_route_the_host_name_is_the_address(host: str) -> None:
    assert address_towards(host, 1) == socket.gethostname()


async def test_a_slow_name_lookup_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop that waits for the name service sends no pings, so the member would count as frozen."""

    def late(*_args: object, **_kinds: object) -> object:
        time.sleep(0.5)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", late)
    finding = asyncio.create_task(find_route_towards("coordinator-1", 50051))
    ticks = 0
    while not finding.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 10
    assert finding.result() == ""
