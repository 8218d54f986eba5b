"""Measure how long a reverse name lookup takes, and warn if it is slow.

For its log, torch looks up the name of the other end of every connection of its stores. The thread that serves
a store waits for each answer. If no name service answers, each connection takes 10 s with glibc's defaults, one
after the other. Then ranks take minutes to meet, and nothing shows why.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

SLOW_S: Final = 1.0
ADVICE: Final = (
    "torch looks up the name at each connection between ranks, and waits for the answer: let the name"
    " service answer for the addresses of nodes (`no such name` is enough), or set"
    " RES_OPTIONS='timeout:1 attempts:1' for the job"
)

_Ask = Callable[[tuple[Any, ...], int], object]


def lookup_s(host: str, *, ask: _Ask = socket.getnameinfo) -> float:
    """Return how many seconds a reverse lookup of `host` (an address or a name) takes; block that long.

    The lookup is made as torch makes it, with IPv4 addresses mapped into IPv6. "No such name" is an answer like
    any other.
    """
    began = time.monotonic()
    with contextlib.suppress(OSError):  # no name, or no answer: only the time counts
        ask((_mapped(host), 9, 0, 0), 0)
    return time.monotonic() - began


def warn_if_slow(
    host: str, warn: Callable[[str], None], *, ask: _Ask = socket.getnameinfo
) -> threading.Thread:
    """Look up the name in a thread of its own; if the lookup is slow, call `warn` with a line of advice."""

    def look() -> None:
        if (took_s := lookup_s(host, ask=ask)) > SLOW_S:
            warn(f"looking up the name of {host} took {took_s:.1f} s; {ADVICE}")

    thread = threading.Thread(target=look, name="strata-names", daemon=True)
    thread.start()
    return thread


def _mapped(host: str) -> str:
    """Return `host`, an address or a name, as an IPv6 address; raise `OSError` for a name that cannot be resolved."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = ipaddress.ip_address(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])
    return f"::ffff:{address}" if address.version == 4 else str(address)
