"""Allowed origins (CORS): a replica's own page and the pages of the cluster's other replicas may read its answers.

A page that lost its replica continues at another replica, which has another origin. Answers allow only the origins of
replicas, so the browser hides the answers from all other pages.

A foreign page may make its own host name resolve to a replica (DNS rebinding). For the browser the replica then has
the page's origin, but the Host header has the foreign name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from typing import Final

from strata.dashboard.source import Source

LONG_S: Final = 600


def peers(source: Source) -> Iterator[str]:
    """Yield the HTTP origins of the cluster's replicas."""
    for state in source.replicas():
        address = state.entry.record.http_address
        if address:
            yield address if address.startswith("https://") else f"http://{address}"


def is_known(source: Source, origin: str, host: str) -> bool:
    """Return whether a page of `origin` may read the answer to a request for `host`."""
    return origin.partition("://")[2] == host or _numbered(origin) in map(_numbered, peers(source))


def is_own_name(source: Source, host: str) -> bool:
    """Return whether a Host header names an IP address, this machine, or one of the replicas."""
    name = _name(host)
    if name in ("localhost", ""):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name in _names(source)
    return True


def _names(source: Source) -> Iterator[str]:
    """Yield the host names of the replicas' addresses, for members and for HTTP."""
    yield socket.gethostname().lower()  # known before etcd has answered
    for state in source.replicas():
        yield _name(state.entry.record.address)
        yield _name(state.entry.record.http_address.rpartition("://")[2])


def _name(host: str) -> str:
    """Return a Host header without its port."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name.lower().removesuffix(".")


def _numbered(origin: str) -> str:
    """Return an origin with `localhost` and `::1` replaced by 127.0.0.1."""
    scheme, _, rest = origin.partition("://")
    name, _, port = rest.rpartition(":")
    return f"{scheme}://127.0.0.1:{port}" if name in ("localhost", "[::1]") else origin


def allowing(origin: str) -> list[tuple[bytes, bytes]]:
    """Return the headers that let a page of `origin` read an answer."""
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"x-strata-replica"),
        (b"vary", b"origin"),
    ]


PREFLIGHT: Final = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, content-type, last-event-id, x-strata-action"),
    (b"access-control-max-age", str(LONG_S).encode()),
]
