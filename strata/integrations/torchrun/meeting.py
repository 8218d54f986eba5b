"""The payloads of torchrun agents in the join barrier of a world: the store's address, and role ranks.

Rank 0's agent sends the address of the store it opened for this generation. An agent whose role is not torch's default
sends its role and its number of workers. So every agent can compute all role ranks without reading them from a store
whose host may be lost by then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strata.errors import ConfigError

DEFAULT_ROLE: Final = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One agent's contribution; `port` is 0 if it opened no store."""

    role: str = DEFAULT_ROLE
    slots: int = 1
    address: str = ""
    port: int = 0

    def encode(self) -> bytes:
        """Return the payload; empty if all values are defaults, as for most agents of a large world."""
        body: dict[str, Any] = {}
        if self.port:
            body = {"torchrun": 1, "address": self.address, "port": self.port}
        if self.role != DEFAULT_ROLE:
            body |= {"role": self.role, "slots": self.slots}
        return json.dumps(body, separators=(",", ":")).encode() if body else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """The store's address for the workers of a generation, and the first rank and size of this agent's role."""

    address: str
    port: int
    role_rank: int
    role_size: int


def meet(payloads: Mapping[int, bytes], *, size: int, first_rank: int, role: str) -> Met:
    """Evaluate all agents' payloads for the agent with `first_rank` and `role`.

    `payloads` maps the first rank of each agent to its payload; `ConfigError` if a payload is not from a torchrun
    agent.
    """
    bodies = {rank: _decode(payload) for rank, payload in payloads.items() if payload}
    try:
        store = bodies[0]
        if store["torchrun"] != 1:
            raise ConfigError("this world was joined by agents of another version of Strata")
        address, port = str(store["address"]), int(store["port"])
        named = {rank: (str(b["role"]), int(b["slots"])) for rank, b in bodies.items() if "role" in b}
    except (KeyError, TypeError, ValueError):
        raise _foreign(payloads.get(0, b"")) from None
    before = sum(slots for rank, (_, slots) in named.items() if rank < first_rank)
    if role == DEFAULT_ROLE:
        others = sum(slots for _, slots in named.values())
        return Met(address=address, port=port, role_rank=first_rank - before, role_size=size - others)
    mine = {rank: slots for rank, (name, slots) in named.items() if name == role}
    return Met(
        address=address,
        port=port,
        role_rank=sum(slots for rank, slots in mine.items() if rank < first_rank),
        role_size=sum(mine.values()),
    )


def _decode(payload: bytes) -> dict[str, Any]:
    try:
        body = json.loads(payload)
    except ValueError:
        raise _foreign(payload) from None
    if not isinstance(body, dict):
        raise _foreign(payload)
    return body


def _foreign(payload: bytes) -> ConfigError:
    return ConfigError(
        f"the join barrier carries no store of torchrun's: {payload[:80]!r}",
        hint="the members of a job are all run by torchrun, or all by strata run",
    )
