"""The accepting side of a link between replicas: dispatches the messages that peers send here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from strata.coordinator.access.permission import check_peer
from strata.coordinator.context import ReplicaContext
from strata.coordinator.peers.links import HELLO_S
from strata.coordinator.view import floors
from strata.core.access.authority import Identity
from strata.core.kv.records import Replica
from strata.errors import InvalidArgument, StrataError, Unavailable
from strata.session.link import Link
from strata.v1 import barriers_pb2, peers_pb2
from strata.v1.peers_pb2 import PeerDown, PeerUp


class PeerHandler:
    """Serves the links of peers, and passes each message to the part that it concerns."""

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
        """`heartbeat` returns whether this replica serves the member, and records the member as alive."""
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
        """Serve one link to its end; `identity` is the peer's, or None if it was not authenticated."""
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
        context = self._context
        found = context.mirror.view.entry(context.keys.replica(first.hello.replica), Replica)
        if found is None or found.record.instance != first.hello.instance:
            raise Unavailable(f"no replica {first.hello.replica[:128]} of that instance is registered")
        welcome = peers_pb2.PeerWelcome(
            replica=context.replica,
            instance=context.instance,
            uid=context.mirror.uid,
            history_since_unix_s=context.charts.history_since_s(),
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
                    link.send(
                        PeerDown(
                            heartbeat_reply=peers_pb2.PeerHeartbeatReply(id=up.heartbeat.id, served=served)
                        )
                    )
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
