"""This node's address for other nodes: the local address of the route to a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import socket


def address_towards(host: str, port: int) -> str:
    """Return the address that this host has on the route to `host`; other nodes can reach this address too.

    Without a name service or a route, return this host's name. Blocks while the name service does not answer.
    """
    return route_towards(host, port) or socket.gethostname()


def route_towards(host: str, port: int) -> str:
    """Return this host's address on the route to `host`, or "" without a name service or a route."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, *_rest, address = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: the kernel only looks up the route
            return str(probe.getsockname()[0])
    return ""


async def find_route_towards(host: str, port: int) -> str:
    """Return `route_towards` without blocking the loop: a process with a session must not wait for a name service."""
    return await asyncio.to_thread(route_towards, host, port)
