"""Links between replicas: each opens one to every other, and sends on it what its members said.

Up go arrivals, progress, and heartbeats of members that the other side serves; down come answers to
heartbeats, and a tick every 500 ms that says whether that replica is ready. A peer counts as ready while its last tick said so and is younger than a second: only such
ones are forwarded to, and only they stand in the order of writers.

Who is dialled follows from `P/replicas/`. Both sides say which instance they are, and the one that
accepts looks the other up in the view: a process of another cluster, or of another age, is none.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Final

from strata.coordinator.charts import SEND_PAUSE_S
from strata.coordinator.context import ReplicaContext
from strata.coordinator.permission import check_peer
from strata.coordinator.view import floors
from strata.core.authority import Identity
from strata.core.deposition import LinkEnd
from strata.core.ids import InstanceId
from strata.core.records import Replica
from strata.core.view import Entry
from strata.errors import InvalidArgument, Refused, StrataError, TransportBroken, Unavailable
from strata.observe import get_logger
from strata.session.link import Link
from strata.v1 import barriers_pb2, peers_pb2
from strata.v1.peers_pb2 import PeerDown, PeerUp
from strata.wire.barriers import batches

log = get_logger()

Dial = Callable[[str], AbstractAsyncContextManager[Link[PeerDown, PeerUp]]]
"""Opens a peer link to an address; `Unavailable` when nobody answers."""

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
HELLO_S: Final = 2.0
SILENT_S: Final = 3.0
"""A link without a tick for so long is opened anew."""
HEARD_S: Final = 1.0
"""How long a peer may take to answer a heartbeat, before its member is taken over from it."""


class _Peer:
    """The link to one instance of another replica."""

    def __init__(self, name: str, entry: Replica) -> None:
        self.name = name
        self.instance = entry.instance
        self.address = entry.address
        self.link: Link[PeerDown, PeerUp] | None = None
        self.says_ready = False
        self.ticked_s = float("-inf")
        self.etcd_s = float("-inf")
        """When it last heard of etcd, by our clock."""
        self.silence: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.heartbeats: dict[int, asyncio.Future[bool]] = {}
        """Those on their way, by id."""


class Peers:
    """Our links to the other replicas. `run` keeps them up."""

    def __init__(self, context: ReplicaContext, dial: Dial) -> None:
        self._context = context
        self._dial = dial
        self._peers: dict[InstanceId, _Peer] = {}
        self._ready: dict[InstanceId, str] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._ids = itertools.count(1)
        self.on_ready: Callable[[], None] = lambda: None
        """Called whenever the set of ready peers changed."""

    def ready(self) -> Collection[InstanceId]:
        """Return the instances of the peers that are ready."""
        return self._ready.keys()

    def ready_addresses(self) -> list[str]:
        """Return where the peers serve that said within a second that they are ready.

        The clock is read anew: after a stall of this process no timer has told yet who is silent.
        """
        return [peer.address for peer in self._ready_now()]

    def better_off(self) -> list[str]:
        """Return where members of ours should go: ready peers, while this replica is sick (5.5)."""
        now_s, health = self._context.clock(), self._context.health
        return [peer.address for peer in self._ready_now() if health.better_off(now_s - peer.etcd_s)]

    def _ready_now(self) -> list[_Peer]:
        since_s = self._context.clock() - self._context.timing.peer_ready_s
        return [peer for one in self._ready if (peer := self._peers[one]).ticked_s >= since_s]

    def forward(self, arrivals: list[barriers_pb2.Arrival]) -> None:
        """Send arrivals to every ready peer."""
        for batch in batches(arrivals):
            self.send(PeerUp(arrivals=peers_pb2.PeerArrivals(arrivals=batch)))

    def send(self, message: PeerUp) -> None:
        """Send a message to every ready peer."""
        for instance in self._ready:
            link = self._peers[instance].link
            if link is not None:
                link.send(message)

    async def heartbeat(self, instance: InstanceId, heartbeat: peers_pb2.PeerHeartbeat) -> bool:
        """Pass a heartbeat on; tell whether that peer serves the member and heard it.

        False when it does not, is not ready, or gives no answer in time: then it counts for nothing.
        """
        peer = self._peers.get(instance)
        if peer is None or peer.link is None or instance not in self._ready:
            return False
        heartbeat.id = next(self._ids)
        heard: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        peer.heartbeats[heartbeat.id] = heard
        peer.link.send(PeerUp(heartbeat=heartbeat))
        try:
            async with asyncio.timeout(HEARD_S):
                return await heard
        except TimeoutError:
            return False
        finally:
            peer.heartbeats.pop(heartbeat.id, None)

    # -- who there is

    async def run(self) -> None:
        """Keep a link to every other replica, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                self.on_replicas()
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None  # nothing is begun while this ends

    def on_replicas(self) -> None:
        """Compare the links with `P/replicas/`; called when that changed."""
        if self._tasks is None:
            return
        there = {
            entry.record.instance: entry
            for entry in self._context.mirror.view.entries(self._context.keys.replicas, Replica)
            if entry.record.instance != self._context.instance
        }
        for instance in self._peers.keys() - there.keys():
            self._drop(self._peers.pop(instance))
        for instance, entry in there.items():
            known = self._peers.get(instance)
            if known is not None and known.address != entry.record.address:
                self._drop(self._peers.pop(instance))
                known = None
            if known is None:
                peer = self._peers[instance] = _Peer(entry.name, entry.record)
                peer.task = self._tasks.create_task(self._keep(peer), name=f"link to {entry.name}")

    def _drop(self, peer: _Peer) -> None:
        self._quiet(peer)
        if peer.task is not None:
            peer.task.cancel()

    async def _keep(self, peer: _Peer) -> None:
        """Have a link to `peer`, again and again."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with self._dial(peer.address) as link:
                    since_s = await self._greet(peer, link)
                    peer.link, pause_s = link, FIRST_PAUSE_S
                    with self._deposition_told(peer), self._history_told(link, since_s):
                        await self._hear(peer, link)
            except StrataError as error:
                say = log.debug if peer.link is None else log.info  # it was up, and every end of one counts
                say("peer_link_down", peer=peer.name, address=peer.address, error=error.message)
            finally:
                self._quiet(peer)
            await asyncio.sleep(pause_s * self._context.rng.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    @contextmanager
    def _deposition_told(self, peer: _Peer) -> Iterator[None]:
        """Tell of an established link and how it ends: it may be the one to the leader (4.7)."""
        deposition, end = self._context.deposition, LinkEnd.OURS
        deposition.linked(peer.instance)
        try:
            yield
        except TransportBroken:
            end = LinkEnd.BROKEN
            raise
        except StrataError:
            end = LinkEnd.SILENT
            raise
        finally:
            deposition.unlinked(peer.instance, end)

    async def _greet(self, peer: _Peer, link: Link[PeerDown, PeerUp]) -> int:
        """Greet each other; return the second before which the peer wants to be told of charts, 0 for never."""
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
    def _history_told(self, link: Link[PeerDown, PeerUp], since_s: int) -> Iterator[None]:
        telling = asyncio.create_task(self._tell_history(link, since_s))
        try:
            yield
        finally:
            telling.cancel()

    async def _tell_history(self, link: Link[PeerDown, PeerUp], since_s: int) -> None:
        """Tell what was recorded before the peer began to; little at a time, for nobody waits for it."""
        for history in self._context.charts.before(since_s) if since_s else ():
            link.send(PeerUp(history=history))
            await asyncio.sleep(SEND_PAUSE_S)

    async def _hear(self, peer: _Peer, link: Link[PeerDown, PeerUp]) -> None:
        while True:
            down = await self._next(peer, link, SILENT_S)
            if down.HasField("tick"):
                peer.etcd_s = self._context.clock() - down.tick.etcd_silence_ms / 1000
                self._context.mirror.note_revision(down.tick.revision)
                self._ticked(peer, down.tick.ready)
            elif down.HasField("heard"):
                heard = peer.heartbeats.get(down.heard.id)
                if heard is not None and not heard.done():
                    heard.set_result(down.heard.served)

    async def _next(self, peer: _Peer, link: Link[PeerDown, PeerUp], limit_s: float) -> PeerDown:
        try:
            async with asyncio.timeout(limit_s):
                down = await link.recv()
        except TimeoutError:
            raise Unavailable(f"{peer.name} at {peer.address} is silent") from None
        if down is None:
            raise TransportBroken(f"{peer.name} at {peer.address} ended the link")
        return down

    # -- who is ready

    def _ticked(self, peer: _Peer, ready: bool) -> None:
        if peer.silence is not None:
            peer.silence.cancel()
            peer.silence = None
        if not ready:
            self._unready(peer)
            return
        peer.ticked_s = self._context.clock()
        peer.silence = asyncio.get_running_loop().call_later(
            self._context.timing.peer_ready_s, self._unready, peer
        )
        if peer.instance not in self._ready and self._peers.get(peer.instance) is peer:
            self._ready[peer.instance] = peer.address
            log.info("peer_ready", peer=peer.name, address=peer.address)
            self.on_ready()

    def _unready(self, peer: _Peer) -> None:
        if self._ready.pop(peer.instance, None) is not None:
            log.info("peer_unready", peer=peer.name, address=peer.address)
            if not self._ready:
                self._context.health.alone()
            self.on_ready()

    def _quiet(self, peer: _Peer) -> None:
        peer.link = None
        for heard in peer.heartbeats.values():
            if not heard.done():
                heard.set_result(False)
        if peer.silence is not None:
            peer.silence.cancel()
            peer.silence = None
        self._unready(peer)


class PeerHandler:
    """The accepting side: what other replicas send here."""

    def __init__(
        self,
        context: ReplicaContext,
        *,
        arrivals: Callable[[Iterable[barriers_pb2.Arrival]], None],
        progress: Callable[[peers_pb2.PeerProgress], None],
        heartbeat: Callable[[peers_pb2.PeerHeartbeat], bool],
        history: Callable[[peers_pb2.PeerHistory], None],
        interest: Callable[[peers_pb2.PeerInterest], None],
    ) -> None:
        """`heartbeat` tells whether the member is served here, and now counts as alive."""
        self._context = context
        self._arrivals = arrivals
        self._progress = progress
        self._heartbeat = heartbeat
        self._history = history
        self._interest = interest
        self._links: dict[Link[PeerUp, PeerDown], None] = {}

    def close_all(self) -> None:
        """End every link: this replica stops."""
        for link in list(self._links):
            link.close()

    async def serve(self, link: Link[PeerUp, PeerDown], identity: Identity | None) -> None:
        """Serve one link to its end; `identity` is who opened it, None if nobody asked."""
        self._links[link] = None
        try:
            await self._welcome(link, identity)
            async with asyncio.TaskGroup() as tasks:
                ticker = tasks.create_task(self._tick(link))
                try:
                    await self._read(link)
                finally:
                    ticker.cancel()
        except StrataError as error:
            link.close(error)
        finally:
            self._links.pop(link, None)

    async def _welcome(self, link: Link[PeerUp, PeerDown], identity: Identity | None) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                first = await link.recv()
        except TimeoutError:
            raise Unavailable(f"no hello came within {HELLO_S:g} s") from None
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("a peer link begins with a hello")
        check_peer(identity, first.hello.replica)
        await floors.honour(self._context.mirror, first.hello.token)
        found = self._replica(first.hello.replica)
        if found is None or found.record.instance != first.hello.instance:
            raise Unavailable(f"no replica {first.hello.replica[:128]} of that instance is registered")
        context = self._context
        welcome = peers_pb2.PeerWelcome(
            replica=context.replica,
            instance=context.instance,
            uid=context.mirror.uid,
            history_since_unix_s=context.charts.wanted_since(),
        )
        context.deposition.met(found.record.instance)
        link.send(PeerDown(welcome=welcome))

    async def _read(self, link: Link[PeerUp, PeerDown]) -> None:
        while (up := await link.recv()) is not None:
            match up.WhichOneof("message"):
                case "arrivals":
                    self._arrivals(up.arrivals.arrivals)
                case "progress":
                    self._progress(up.progress)
                case "heartbeat":
                    served = self._heartbeat(up.heartbeat)
                    link.send(PeerDown(heard=peers_pb2.PeerHeard(id=up.heartbeat.id, served=served)))
                case "history":
                    self._history(up.history)
                case "interest":
                    self._interest(up.interest)
                case _:
                    pass  # of a newer version

    async def _tick(self, link: Link[PeerUp, PeerDown]) -> None:
        while True:
            ready, _why = self._context.is_ready()
            revision = self._context.mirror.view.revision
            silence_ms = round(1000 * self._context.health.etcd_silence_s())
            tick = peers_pb2.PeerTick(ready=ready, revision=revision, etcd_silence_ms=silence_ms)
            link.send(PeerDown(tick=tick))
            await asyncio.sleep(self._context.timing.peer_tick_s)

    def _replica(self, name: str) -> Entry[Replica] | None:
        return self._context.mirror.view.entry(self._context.keys.replica(name), Replica)
