"""Where other nodes reach this one."""

from __future__ import annotations

import asyncio
import contextlib
import socket


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the route to `host`, where other nodes reach it too.

    Without a name service or a route it is this host's name. It blocks while the name service says nothing.
    """
    return route_towards(host, port) or socket.gethostname()


def route_towards(host: str, port: int) -> str:
    """Return the same address, or "" without a name service or a route."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, *_rest, address = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only asks the routing table
            return str(probe.getsockname()[0])
    return ""


async def find_route_towards(host: str, port: int) -> str:
    """Return `route_towards`, while the loop goes on: what holds a session must not wait for a name service."""
    return await asyncio.to_thread(route_towards, host, port)
