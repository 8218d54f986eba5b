"""The registry of the other replicas: records which are ready, and sends messages to the ready ones.

A peer is ready while its last tick reports it as ready and is less than a second old. Arrivals are forwarded only to
ready peers, and only ready peers are in the order of writers. `PeerLinks` dials peers and updates this registry.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from typing import Final

from strata.coordinator.context import ReplicaContext
from strata.core.ids import InstanceId
from strata.core.kv.records import Replica
from strata.session.link import Link
from strata.v1 import barriers_pb2, peers_pb2
from strata.v1.peers_pb2 import PeerDown, PeerUp
from strata.wire.barriers import batches

NOT_RECEIVED: Final = "the replica that answers receives nothing from it"
HEARTBEAT_REPLY_S: Final = 1.0
"""How long a peer may take to answer a heartbeat, before this replica takes the member over."""


class Peer:
    """The link to one instance of another replica."""

    def __init__(self, name: str, entry: Replica) -> None:
        self.name = name
        self.instance = entry.instance
        self.address = entry.address
        self.link: Link[PeerDown, PeerUp] | None = None
        self.ticked_s = float("-inf")
        self.etcd_s = float("-inf")
        """When the peer last received an answer of etcd, by this replica's clock."""
        self.task: asyncio.Task[None] | None = None
        self.heartbeats: dict[int, asyncio.Future[bool]] = {}
        """Heartbeats without an answer yet, by id."""


class PeerRegistry:
    """The peers, by their instances."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self.peers: dict[InstanceId, Peer] = {}
        self._ready: dict[InstanceId, str] = {}
        self._ids = itertools.count(1)

    def ready(self) -> Collection[InstanceId]:
        """Return the instances of the ready peers."""
        return self._ready.keys()

    def ready_addresses(self) -> list[str]:
        """Return the addresses of peers that reported within a second that they are ready.

        The clock is read again: after a stall of this process, no timer has marked the silent peers yet.
        """
        return [peer.address for peer in self._ready_now()]

    def better_off(self) -> list[str]:
        """Return the addresses to which members should move: ready peers, while this replica is unhealthy (5.5)."""
        now_s, health = self._context.clock(), self._context.health
        return [peer.address for peer in self._ready_now() if health.better_off(now_s - peer.etcd_s)]

    def silent(self) -> list[Peer]:
        """Return the peers that count as ready, but have not reported for a second that they are."""
        now_ready = self._ready_now()
        return [peer for one in self._ready if (peer := self.peers[one]) not in now_ready]

    def _ready_now(self) -> list[Peer]:
        since_s = self._context.clock() - self._context.timing.peer_ready_s
        return [peer for one in self._ready if (peer := self.peers[one]).ticked_s >= since_s]

    def forward(self, arrivals: list[barriers_pb2.Arrival]) -> None:
        """Send arrivals to every ready peer."""
        for batch in batches(arrivals):
            self.send(PeerUp(arrivals=peers_pb2.PeerArrivals(arrivals=batch)))

    def send(self, message: PeerUp) -> None:
        """Send a message to every ready peer."""
        for instance in self._ready:
            link = self.peers[instance].link
            if link is not None:
                link.send(message)

    async def heartbeat(self, instance: InstanceId, heartbeat: peers_pb2.PeerHeartbeat) -> bool:
        """Forward a heartbeat; return whether the peer serves the member and received it.

        False if the peer does not serve the member, is not ready, or does not answer in time: then the
        heartbeat has no effect.
        """
        peer = self.peers.get(instance)
        if peer is None or peer.link is None or instance not in self._ready:
            return False
        heartbeat.id = next(self._ids)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        peer.heartbeats[heartbeat.id] = answer
        peer.link.send(PeerUp(heartbeat=heartbeat))
        try:
            async with asyncio.timeout(HEARTBEAT_REPLY_S):
                return await answer
        except TimeoutError:
            return False
        finally:
            peer.heartbeats.pop(heartbeat.id, None)

    def now_ready(self, peer: Peer) -> bool:
        """Record that a peer is ready; return whether that is a change."""
        if peer.instance in self._ready or self.peers.get(peer.instance) is not peer:
            return False
        self._ready[peer.instance] = peer.address
        return True

    def no_longer_ready(self, peer: Peer) -> bool:
        """Record that a peer is not ready; return whether that is a change."""
        return self._ready.pop(peer.instance, None) is not None
