"""`P/coordinators/<replica>`: a coordinator that registered once and was not forgotten (PROTOCOLS 4.9)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    """The part of a coordinator's registration that outlives its lease.

    `unreachable_since_unix_ms`: when a leader saw that the registration was deleted; 0 while the registration exists.
    """

    address: str = ""
    epoch: int = 0
    unreachable_since_unix_ms: int = 0
