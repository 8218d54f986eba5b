"""How long the name service takes to say what an address is called.

torch asks it for the name of the other end of every connection of its stores, to have it for its log, and the
thread that serves a store waits for each answer. Where nobody answers, that is 10 s a connection by glibc's
defaults, one after the other: ranks take minutes to meet, and nothing says why.
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
    "torch asks for the name at every connection where ranks meet, and waits for the answer: have the name"
    " service answer for the addresses of nodes (that there is none will do), or set"
    " RES_OPTIONS='timeout:1 attempts:1' for the job"
)

_Ask = Callable[[tuple[Any, ...], int], object]


def lookup_s(host: str, *, ask: _Ask = socket.getnameinfo) -> float:
    """Return how many seconds the name of `host`, an address or a name, took to be looked up; it blocks for these.

    It is asked for as torch does, which knows IPv4 addresses as mapped into IPv6. That there is no name is
    an answer like any other.
    """
    began = time.monotonic()
    with contextlib.suppress(OSError):  # there is none, or nobody answered: how long it took is what counts
        ask((_mapped(host), 9, 0, 0), 0)
    return time.monotonic() - began


def warn_if_slow(
    host: str, warn: Callable[[str], None], *, ask: _Ask = socket.getnameinfo
) -> threading.Thread:
    """Have `warn` called with a line that says what to do, by a thread of its own, if the lookup took long."""

    def look() -> None:
        if (took_s := lookup_s(host, ask=ask)) > SLOW_S:
            warn(f"looking up the name of {host} took {took_s:.1f} s; {ADVICE}")

    thread = threading.Thread(target=look, name="strata-names", daemon=True)
    thread.start()
    return thread


def _mapped(host: str) -> str:
    """Return `host` as an IPv6 address; as it is when it names a host that cannot be found."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = ipaddress.ip_address(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])
    return f"::ffff:{address}" if address.version == 4 else str(address)
