"""The dialling side of links between replicas: one link to every other registered replica.

The dialling side sends arrivals, progress, and heartbeats of members that the peer serves. The accepting side
sends answers to heartbeats, and a tick every 500 ms that reports whether the accepting replica is ready.

`P/replicas/` lists the replicas to dial. Both sides send their instance. The accepting side looks up the
dialling instance in its own view, and so refuses a process of another cluster or of an earlier run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Final

from strata.coordinator.context import ReplicaContext
from strata.coordinator.peers.registry import Peer, PeerRegistry
from strata.coordinator.reports.charts import SEND_PAUSE_S
from strata.coordinator.view import floors
from strata.core.kv.records import Replica
from strata.errors import Refused, StrataError, TransportBroken, Unavailable
from strata.observe import get_logger
from strata.session.link import Link
from strata.v1 import peers_pb2
from strata.v1.peers_pb2 import PeerDown, PeerUp

log = get_logger()

Dial = Callable[[str], AbstractAsyncContextManager[Link[PeerDown, PeerUp]]]
"""Opens a peer link to an address; `Unavailable` if there is no answer."""

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
HELLO_S: Final = 2.0
SILENT_S: Final = 3.0
"""A link without a tick for this long is closed and opened again."""
SILENCE_POLL_S: Final = 0.05
"""How often peers that have been silent for too long are marked as not ready."""


class PeerLinks:
    """Maintains the links and the registry of peers. `on_change` is called whenever the set of ready peers changes."""

    def __init__(
        self,
        context: ReplicaContext,
        dial: Dial,
        registry: PeerRegistry,
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._dial = dial
        self._registry = registry
        self._on_change = on_change
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Maintain a link to every other replica, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                self.on_replicas()
                while True:
                    await asyncio.sleep(SILENCE_POLL_S)
                    for peer in self._registry.silent():
                        self._unready(peer)
            finally:
                self._tasks = None  # no link is opened from here on

    def on_replicas(self) -> None:
        """Compare the links with `P/replicas/`; called when it changed."""
        if self._tasks is None:
            return
        registered = {
            entry.record.instance: entry
            for entry in self._context.mirror.view.entries(self._context.keys.replicas, Replica)
            if entry.record.instance != self._context.instance
        }
        for instance in self._registry.peers.keys() - registered.keys():
            self._drop(self._registry.peers.pop(instance))
        for instance, entry in registered.items():
            known = self._registry.peers.get(instance)
            if known is not None and known.address != entry.record.address:
                self._drop(self._registry.peers.pop(instance))
                known = None
            if known is None:
                peer = self._registry.peers[instance] = Peer(entry.name, entry.record)
                peer.task = self._tasks.create_task(self._maintain(peer), name=f"link to {entry.name}")

    def _drop(self, peer: Peer) -> None:
        self._mark_down(peer)
        if peer.task is not None:
            peer.task.cancel()

    async def _maintain(self, peer: Peer) -> None:
        """Open a link to `peer`, again after each failure."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with self._dial(peer.address) as link:
                    since_s = await self._greet(peer, link)
                    peer.link, pause_s = link, FIRST_PAUSE_S
                    with self._deposition_informed(peer), self._history_sent(link, since_s):
                        await self._receive(peer, link)
            except StrataError as error:
                log_line = log.debug if peer.link is None else log.info  # info: the link had been up
                log_line("peer_link_down", peer=peer.name, address=peer.address, error=error.message)
            finally:
                self._mark_down(peer)
            await asyncio.sleep(pause_s * self._context.rng.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    @contextmanager
    def _deposition_informed(self, peer: Peer) -> Iterator[None]:
        """Report to the deposition that a link was established and how it ended: the peer may be the leader (4.7)."""
        deposition, broke = self._context.deposition, False
        deposition.linked(peer.instance)
        try:
            yield
        except TransportBroken:
            broke = True
            raise
        finally:
            deposition.unlinked(peer.instance, broke=broke)

    async def _greet(self, peer: Peer, link: Link[PeerDown, PeerUp]) -> int:
        """Exchange hellos; return the second before which the peer requests charts, or 0 if the peer needs none."""
        hello = peers_pb2.PeerHello(
            replica=self._context.replica,
            instance=self._context.instance,
            token=floors.token(self._context.mirror),
        )
        link.send(PeerUp(hello=hello))
        welcome = (await self._next(peer, link, HELLO_S)).welcome
        if welcome.instance != peer.instance or welcome.uid != self._context.mirror.uid:
            raise Refused(f"{peer.address} is {welcome.replica} ({welcome.instance}), not {peer.instance}")
        return welcome.history_since_unix_s

    @contextmanager
    def _history_sent(self, link: Link[PeerDown, PeerUp], since_s: int) -> Iterator[None]:
        sending = asyncio.create_task(self._send_history(link, since_s))
        try:
            yield
        finally:
            sending.cancel()

    async def _send_history(self, link: Link[PeerDown, PeerUp], since_s: int) -> None:
        """Send the charts recorded before the peer began to record, in small parts, since nobody waits for them."""
        for history in self._context.charts.before(since_s) if since_s else ():
            link.send(PeerUp(history=history))
            await asyncio.sleep(SEND_PAUSE_S)

    async def _receive(self, peer: Peer, link: Link[PeerDown, PeerUp]) -> None:
        while True:
            down = await self._next(peer, link, SILENT_S)
            if down.HasField("tick"):
                peer.etcd_s = self._context.clock() - down.tick.etcd_silence_ms / 1000
                self._context.mirror.note_revision(down.tick.revision)
                self._ticked(peer, down.tick.ready)
            elif down.HasField("heartbeat_reply"):
                reply = peer.heartbeats.get(down.heartbeat_reply.id)
                if reply is not None and not reply.done():
                    reply.set_result(down.heartbeat_reply.served)

    async def _next(self, peer: Peer, link: Link[PeerDown, PeerUp], limit_s: float) -> PeerDown:
        try:
            async with asyncio.timeout(limit_s):
                down = await link.recv()
        except TimeoutError:
            raise Unavailable(f"{peer.name} at {peer.address} is silent") from None
        if down is None:
            raise TransportBroken(f"{peer.name} at {peer.address} ended the link")
        return down

    # -- readiness of peers

    def _ticked(self, peer: Peer, ready: bool) -> None:
        if not ready:
            self._unready(peer)
            return
        peer.ticked_s = self._context.clock()
        if self._registry.now_ready(peer):
            log.info("peer_ready", peer=peer.name, address=peer.address)
            self._on_change()

    def _unready(self, peer: Peer) -> None:
        if self._registry.no_longer_ready(peer):
            log.info("peer_unready", peer=peer.name, address=peer.address)
            if not self._registry.ready():
                self._context.health.alone()
            self._on_change()

    def _mark_down(self, peer: Peer) -> None:
        peer.link = None
        for reply in peer.heartbeats.values():
            if not reply.done():
                reply.set_result(False)
        self._unready(peer)
