"""Where other nodes reach this one."""

from __future__ import annotations

import socket

import pytest

from strata.client import parse_endpoints
from strata.launch.addresses import address_towards


@pytest.mark.parametrize(
    ("endpoint", "address"), [("127.0.0.1", "127.0.0.1"), ("http://[::1]:50051", "::1"), ("127.0.0.2:7", "")]
)
def test_ranks_are_reached_where_the_route_to_the_coordinators_begins(endpoint: str, address: str) -> None:
    to = parse_endpoints(endpoint)[0]
    found = address_towards(to.host, to.port)
    assert found == address or (not address and found.startswith("127."))


@pytest.mark.parametrize("host", ["no-such-host.invalid", ""])
def test_without_a_route_the_host_s_name_has_to_do(host: str) -> None:
    assert address_towards(host, 1) == socket.gethostname()
