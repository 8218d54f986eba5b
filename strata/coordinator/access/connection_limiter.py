"""Connection limits of the gRPC port, enforced by reading the process's descriptors once a second.

gRPC's C core limits the time of a handshake, the idle time and the streams of a connection, and the number of all
connections (`server.server_options`). The C core does not know whether a connection's client is authenticated, and
does not count connections by address. This module limits unauthenticated connections and the connections of an
address, by the rule in `core.access.connection_limits`. An admitted call names its connection by the peer's address
and port.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any, Final, Protocol

from strata.config import CoordinatorConfig
from strata.coordinator.access.descriptors import Accepted, Descriptors, Peer, limit, shut
from strata.core.access.connection_limits import (
    Connections,
    Excess,
    Limits,
    Reason,
    Shares,
    address_key,
    plain_host,
    shares,
    worst_address,
)
from strata.core.access.rate_limits import Seldom
from strata.observe import get_logger
from strata.observe.metrics import Counter, Family, counters

log = get_logger()

POLL_S: Final = 1.0
BUSY_POLL_S: Final = 0.1
"""The pause between checks while more than three quarters of the connections are in use."""
LOG_S: Final = 60.0


def connection_shares(config: CoordinatorConfig) -> Shares:
    """Return how many connections each port of this process may have; `ConfigError` if descriptors are too few."""
    return shares(
        descriptors=limit(), most=config.max_connections, per_address=config.max_connections_per_address
    )


class ConnectionReport:
    """The connections of a replica, for its metrics: how many are open at each port, and how many the replica
    closed, by reason.
    """

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.closed: Family[Counter] = counters(
            "strata_connections_closed_total",
            "Connections that this replica closed: without an admitted call for too long (unadmitted), or above"
            " the limit of an address (address), of strangers (strangers) or of all (all), or whose certificate"
            " is not accepted, or no longer (certificate).",
            *("port", "reason"),
        )
        self._due = Seldom(LOG_S)
        self._unreported: Tally[str] = Tally()

    def report_closed(self, port: str, excess: Sequence[Excess[Any]], now_s: float) -> None:
        """Count the closed connections; log them once a minute at most."""
        for each in excess:
            self.closed.child(port, each.reason).add()
            self._unreported[f"{port} {each.reason}"] += 1
        if excess and self._due.due(now_s) is not None:
            log.warning(
                "connections_closed",
                counts=dict(self._unreported),
                most_from=worst_address(list(excess)),
                open=dict(self.open),
                hint="docs/security.md: connections",
            )
            self._unreported.clear()


class Callers(Protocol):
    """The peers of recent calls. Each method returns the peers since its previous call."""

    def admitted(self) -> set[str]:
        """Return the peers whose calls were admitted."""
        ...

    def refused(self) -> set[str]:
        """Return the peers whose certificate was refused: no call on these connections can be admitted."""
        ...


class ConnectionLimiter:
    """Closes the connections of one gRPC port that exceed the limits, while it runs."""

    def __init__(
        self,
        port: int,
        limits: Limits,
        report: ConnectionReport,
        callers: Callers,
    ) -> None:
        self._descriptors = Descriptors(port)
        self._connections: Connections[Accepted] = Connections(limits)
        self._by_peer: dict[Peer, Accepted] = {}
        self._report = report
        self._callers = callers
        self._refused: set[str] = set()
        """Peers refused before the last check: their refusals have been sent by now."""
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        """Check and close connections, until cancelled."""
        while True:
            await self.look()
            is_nearly_full = len(self._connections) > self._connections.limits.most * 3 // 4
            await asyncio.sleep(BUSY_POLL_S if is_nearly_full else POLL_S)

    async def look(self) -> None:
        """Close the connections that exceed the limits now."""
        async with self._looking:
            await self._look()

    async def end(self, peer: str) -> bool:
        """Close the connection of `peer` (named as in a call's context); False if the connection has already ended."""
        await self.look()
        connection = self._by_peer.get(peer_of(peer))
        if connection is not None:
            shut(connection)
        return connection is not None

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        # read these peers before the descriptors: so a peer without a descriptor has disconnected
        admitted = self._callers.admitted()
        seen = await asyncio.to_thread(self._descriptors.look)
        now_s = loop.time()
        for ended in seen.closed:
            self._connections.closed(ended)
            if self._by_peer.get(ended.peer) is ended:
                del self._by_peer[ended.peer]
        for accepted in seen.opened:
            self._connections.opened(accepted, address_key(accepted.peer[0]), now_s)
            self._by_peer[accepted.peer] = accepted
        for text in admitted:
            connection = self._by_peer.get(peer_of(text))
            if connection is not None:
                self._connections.admitted(connection)
        excess = self._connections.excess(now_s)
        for each in excess:
            if not shut(each.connection):  # the next check finds the connection closed, or tries again
                self._connections.opened(each.connection, each.address, now_s)
        due, self._refused = self._refused, self._callers.refused()
        for text in due:
            connection = self._by_peer.get(peer_of(text))
            if connection is not None and shut(connection):
                address = address_key(connection.peer[0])
                excess.append(Excess(connection=connection, address=address, reason=Reason.CERTIFICATE))
        self._report.open["grpc"] = len(self._connections)
        self._report.report_closed("grpc", excess, now_s)


def peer_of(text: str) -> Peer:
    """Return host and port of a gRPC peer string: `ipv4:10.0.0.7:40312`, `ipv6:%5B::1%5D:40312`."""
    host, _, port = urllib.parse.unquote(text.partition(":")[2]).rpartition(":")
    return plain_host(host.strip("[]")), int(port) if port.isdecimal() else 0
