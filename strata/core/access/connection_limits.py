"""Connection limits: which connections a server closes, by one rule for gRPC and for HTTP.

A connection is a *stranger* until its first admitted call: a call with an authenticated caller, or any call if the
server authenticates no caller. Connections are closed in this order:

1. a stranger that is older than `stranger_s`;
2. the excess of an address with more than `per_address` connections;
3. the excess over `strangers` strangers;
4. the excess over `most` connections.

In cases 2 to 4 strangers are closed first: each time the oldest stranger of the address that has the most
strangers. So strangers do not displace admitted connections, not even those of their own address. If only admitted
connections are left, the newest is closed first, so that work in progress continues.
"""

from __future__ import annotations

import heapq
import ipaddress
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from strata.errors import ConfigError

C = TypeVar("C", bound=Hashable)

RESERVED_DESCRIPTORS: Final = 128
"""Descriptors kept for other uses than callers' connections: etcd, peers, probes, files, the log."""
HTTP_SHARE: Final = 8
"""HTTP gets one connection in this many, up to `HTTP_CONNECTIONS`."""
HTTP_CONNECTIONS: Final = 512
HTTP_SPEAKING: Final = 128
"""The maximum of HTTP connections whose client has sent data; with TLS each of them costs 450 KB."""
MAX_STRANGERS: Final = 1_024
"""The maximum of strangers; a stranger that has completed its TLS handshake costs 100 KB."""
STRANGER_S: Final = 10.0
LEAST_CONNECTIONS: Final = 16
LEAST_SPEAKING: Final = 4


class Reason(StrEnum):
    """Why a connection is closed."""

    UNADMITTED = "unadmitted"
    ADDRESS = "address"
    STRANGERS = "strangers"
    ALL = "all"
    CERTIFICATE = "certificate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The connection limits of one port."""

    most: int
    per_address: int
    strangers: int
    stranger_s: float = STRANGER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The limits of a replica's two ports; neither port takes descriptors from the other or from etcd."""

    grpc: Limits
    http_silent: Limits
    """Connections whose client has not sent anything yet."""
    http_speaking: Limits


def shares(*, descriptors: int, most: int, per_address: int) -> Shares:
    """Return the limits for these settings and this hard limit of descriptors.

    `ConfigError` if the descriptors do not suffice for any connections.
    """
    left = descriptors - RESERVED_DESCRIPTORS
    http = min(HTTP_CONNECTIONS, left // HTTP_SHARE)
    grpc = min(most, left - http)
    speaking = min(HTTP_SPEAKING, http // 4)
    if grpc < LEAST_CONNECTIONS or speaking < LEAST_SPEAKING:
        raise ConfigError(
            f"a limit of {descriptors} descriptors allows {max(grpc, 0)} connections",
            hint="raise the hard limit of descriptors to 1024 or more (ulimit -Hn, LimitNOFILE=), and"
            f" coordinator.max_connections to {LEAST_CONNECTIONS} or more",
        )
    return Shares(
        grpc=Limits(
            most=grpc, per_address=min(per_address, grpc), strangers=min(MAX_STRANGERS, (grpc + 1) // 2)
        ),
        http_silent=_all_strangers(http - speaking, per_address=http - speaking),
        http_speaking=_all_strangers(speaking, per_address=(speaking + 1) // 2),
    )


def _all_strangers(most: int, *, per_address: int) -> Limits:
    """Return the limits of a port whose callers never authenticate and whose connections last only seconds."""
    return Limits(most=most, per_address=per_address, strangers=most, stranger_s=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess(Generic[C]):
    """A connection to close, and why."""

    connection: C
    address: str
    reason: Reason


@dataclass(slots=True)
class _Open:
    address: str
    since_s: float
    admitted: bool = False


class Connections(Generic[C]):
    """The open connections of one port. Not thread-safe; times are of any monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: dict[C, _Open] = {}
        """Ordered from oldest to newest."""

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: C, address: str, now_s: float) -> None:
        """Add a new connection from `address`, as a stranger."""
        self._open[connection] = _Open(address, now_s)

    def admitted(self, connection: C) -> None:
        """Mark a connection as admitted; no effect if the connection is not counted, or not any more."""
        if connection in self._open:
            self._open[connection].admitted = True

    def closed(self, connection: C) -> None:
        """Remove a connection; no effect if the connection is not counted."""
        self._open.pop(connection, None)

    def all(self) -> list[C]:
        """Return all counted connections."""
        return list(self._open)

    def excess(self, now_s: float) -> list[Excess[C]]:
        """Return the connections to close, and stop counting them."""
        return [*self._too_old(now_s), *self._of_addresses(), *self._of_strangers(), *self._of_all()]

    def _too_old(self, now_s: float) -> Iterator[Excess[C]]:
        for connection in self._strangers():
            if now_s - self._open[connection].since_s > self.limits.stranger_s:
                yield self._given_up(connection, Reason.UNADMITTED)

    def _of_addresses(self) -> Iterator[Excess[C]]:
        for own in self._by_address([*self._admitted(), *reversed(self._strangers())]).values():
            while len(own) > self.limits.per_address:
                yield self._given_up(own.pop(), Reason.ADDRESS)

    def _of_strangers(self) -> Iterator[Excess[C]]:
        strangers = self._strangers()
        yield from self._of_fullest(
            [*reversed(strangers)], len(strangers) - self.limits.strangers, Reason.STRANGERS
        )

    def _of_all(self) -> Iterator[Excess[C]]:
        strangers = self._strangers()
        count = min(len(self) - self.limits.most, len(strangers))
        yield from self._of_fullest([*reversed(strangers)], count, Reason.ALL)
        yield from self._of_fullest(self._admitted(), len(self) - self.limits.most, Reason.ALL)

    def _strangers(self) -> list[C]:
        return [connection for connection, each in self._open.items() if not each.admitted]

    def _admitted(self) -> list[C]:
        return [connection for connection, each in self._open.items() if each.admitted]

    def _by_address(self, connections: Iterable[C]) -> dict[str, list[C]]:
        found: dict[str, list[C]] = {}
        for connection in connections:
            found.setdefault(self._open[connection].address, []).append(connection)
        return found

    def _of_fullest(self, connections: Iterable[C], count: int, reason: Reason) -> Iterator[Excess[C]]:
        """Yield `count` connections to close: each time the last in order from the address with the most."""
        if count <= 0:
            return
        left = self._by_address(connections)
        heap = [(-len(own), address) for address, own in left.items()]
        heapq.heapify(heap)
        for _ in range(count):
            most, address = heap[0]
            yield self._given_up(left[address].pop(), reason)
            heapq.heapreplace(heap, (most + 1, address))

    def _given_up(self, connection: C, reason: Reason) -> Excess[C]:
        return Excess(connection=connection, address=self._open.pop(connection).address, reason=reason)


def plain_host(host: str) -> str:
    """Return an address in canonical form: IPv4 instead of IPv4-mapped IPv6, and without a scope."""
    host = host.partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def address_key(host: str) -> str:
    """Return the key under which a host's connections are counted: the IPv4 address, or the /64 of an IPv6 one.

    A host can use any address of its /64.
    """
    host = plain_host(host)
    if ":" not in host or host == "::1":
        return host
    return str(ipaddress.ip_network((host, 64), strict=False))


def worst_address(excess: list[Excess[C]]) -> str:
    """Return the address that lost the most connections; "" if none was lost."""
    lost = Counter(each.address for each in excess)
    return lost.most_common(1)[0][0] if lost else ""
