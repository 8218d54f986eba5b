"""The rendezvous address of a generation's ranks: rank 0's member picks a new one for each generation.

torch's `env://` rendezvous opens its store at MASTER_ADDR:MASTER_PORT inside rank 0's process, after every rank has
the address. No other program may take the port in between, so the agent binds the port, without listening. The kernel
then does not hand out the port to programs that request any free port. The store's own listening socket can share the
port, since both sockets set SO_REUSEADDR.

A port is used for one generation only: a store that served an earlier generation has stale keys.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from types import TracebackType

from strata.errors import Refused

JOIN_BARRIER = "strata.join"


@dataclass(frozen=True, slots=True)
class Meeting:
    """The rendezvous address, carried in the payload of the join barrier."""

    address: str
    port: int

    def encode(self) -> bytes:
        """Return the payload."""
        return json.dumps({"address": self.address, "port": self.port}).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Meeting:
        """Return the address in `payload`; `Refused` when another program wrote it."""
        try:
            body = json.loads(payload)
            return cls(address=str(body["address"]), port=int(body["port"]))
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(
                f"the join barrier carries no meeting address: {payload[:80]!r}",
                hint="all members of a job must be run by the same version of strata run",
            ) from error


class ReservedPort:
    """A TCP port that stays reserved on this host until `close`."""

    def __init__(self) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        if family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port; a socket that listens on it by now is not disturbed."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
