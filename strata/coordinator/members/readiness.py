"""The addresses to which members are sent: this replica's, or a healthier replica's (PROTOCOLS 5.5)."""

from __future__ import annotations

from typing import Final

from strata.coordinator.context import ReplicaContext
from strata.coordinator.peers.registry import PeerRegistry
from strata.v1 import session_pb2

STEADY_S: Final = 2.0
"""How long a replica must have been ready before it accepts members whose only reason to move is that their own
replica is not ready. After an etcd outage of all replicas, the members' own replicas are ready by then too, and have
reported it."""


class Readiness:
    """Whether this replica is ready, and since when. The service calls `note` every turn."""

    def __init__(self, context: ReplicaContext, peers: PeerRegistry) -> None:
        self._context = context
        self._peers = peers
        self._since_s: float | None = None

    def note(self) -> None:
        """Record whether this replica is ready now."""
        if not self._context.is_ready()[0]:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = self._context.clock()

    def tick(self, sequence: int) -> session_pb2.Tick:
        """Return this replica's readiness, and the replicas known to be healthier (none if they lost etcd too)."""
        elsewhere = self._peers.better_off()
        ready = not elsewhere and self._context.is_ready()[0]
        addresses = self._peers.ready_addresses() if ready else elsewhere
        return session_pb2.Tick(sequence=sequence, ready=ready, ready_addresses=addresses)

    def unsteady(self) -> str:
        """Return why members of other replicas may not move to this replica, or an empty string if they may."""
        ready, why = self._context.is_ready()
        if not ready:
            return why
        if self._since_s is None or self._context.clock() < self._since_s + STEADY_S:
            return "it has been ready for a moment only"
        return ""
