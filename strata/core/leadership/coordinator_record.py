"""`P/coordinators/<replica>`: a coordinator that was registered, and that no operator has forgotten (PROTOCOLS 4.9)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    """What stays of a coordinator's registration when its lease ends.

    `unreachable_since_unix_ms` is when a leader saw that the registration was gone; 0 while it is there.
    """

    address: str = ""
    epoch: int = 0
    unreachable_since_unix_ms: int = 0
