"""A plain TCP connect that distinguishes a refused connection from every other result."""

from __future__ import annotations

import asyncio
import socket

from strata.config import split_address
from strata.core.leadership.takeover import Probe
from strata.errors import ConfigError

CONNECT_S = 0.5


async def tcp_probe(address: str) -> Probe:
    """Connect to `host:port` and close. Return REFUSED only if every address of the host refuses."""
    try:
        host, port = split_address("address", address)
        async with asyncio.timeout(CONNECT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers = [await _connect(family, where) for family, _type, _proto, _name, where in found]
    except (TimeoutError, OSError, UnicodeError, ConfigError):  # UnicodeError: the host is not a valid name
        return Probe.UNCLEAR
    if Probe.ANSWERED in answers:
        return Probe.ANSWERED
    return Probe.REFUSED if answers and set(answers) == {Probe.REFUSED} else Probe.UNCLEAR


async def _connect(family: int, where: object) -> Probe:
    with socket.socket(family, socket.SOCK_STREAM) as plain:
        plain.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(plain, where)  # type: ignore[arg-type]  # of getaddrinfo
        except ConnectionRefusedError:
            return Probe.REFUSED
        except OSError:
            return Probe.UNCLEAR
        return Probe.ANSWERED
