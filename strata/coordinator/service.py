"""The serving half of a replica without its transport: what the simulation runs as well.

links and requests ──▶ Service ──▶ sessions, barriers, watches, calls
▲
mirror ──▶ Fanout ───────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import Message

from strata.coordinator.barriers.peers import Dial, PeerHandler, Peers
from strata.coordinator.barriers.rounds import Barriers
from strata.coordinator.calls.barriers import BarrierCalls
from strata.coordinator.calls.checkpoints import CatalogCalls
from strata.coordinator.calls.datasets import DatasetCalls
from strata.coordinator.calls.dispatch import ANYBODY, Calls
from strata.coordinator.calls.keeping import KeepingCalls
from strata.coordinator.calls.recovery import RecoveryCalls
from strata.coordinator.calls.worlds import WorldCalls
from strata.coordinator.context import ReplicaContext
from strata.coordinator.fanout import Fanout
from strata.coordinator.members.interest import Interest
from strata.coordinator.members.keeper import Keeper
from strata.coordinator.members.progress import ProgressBoard, Reported
from strata.coordinator.members.ranks import RankIndexes
from strata.coordinator.members.registrar import Registrar
from strata.coordinator.members.session import House
from strata.coordinator.members.sessions import Sessions
from strata.coordinator.members.unary import UnaryMembers
from strata.coordinator.view.watches import Watches
from strata.core.authority import Identity
from strata.core.barriers import OpenRound
from strata.core.health import TURN_S
from strata.core.ids import InstanceId
from strata.session.link import Link
from strata.v1 import barriers_pb2, members_pb2, peers_pb2, session_pb2
from strata.wire import barriers as barrier_wire

STEADY_S: Final = 2.0
"""How long a replica is ready before it takes members who merely look for a ready one. When etcd is back
for everybody, their own replicas are ready as well by then, and have said so."""


class Service:
    """Serves sessions, peers, watches and requests, whatever carries them."""

    def __init__(self, context: ReplicaContext, dial: Dial) -> None:
        ranks = RankIndexes(context.mirror.view, context.keys)
        self._context = context
        self._board = ProgressBoard()
        self._interest = Interest()
        self._ready_since_s: float | None = None
        self.peers = Peers(context, dial)
        self.barriers = Barriers(
            context,
            ranks,
            forward=self.peers.forward,
            ready=self.peers.ready,
            phases=self._board.phases,
            served=self._served,
        )
        self.peers.on_ready = self._tell_peers_everything
        self.keeper = Keeper(context)
        registrar = Registrar(context, self.keeper)
        self._unary = unary = UnaryMembers(
            context,
            self.keeper,
            registrar,
            ranks,
            self._board,
            relay=self.peers.heartbeat,
            elsewhere=self.peers.better_off,
        )
        self._barrier_calls = BarrierCalls(context, ranks, self.barriers)
        self.calls = Calls(
            context.mirror,
            CatalogCalls(context).table(),
            KeepingCalls(context).table(),
            WorldCalls(context).table(),
            RecoveryCalls(context).table(),
            DatasetCalls(context).table(),
            unary.table(),
            self._barrier_calls.table(),
            cluster=context.keys.cluster,
        )
        house = House(
            context=context,
            barriers=self.barriers,
            board=self._board,
            calls=self.calls,
            ranks=ranks,
            tick=self._tick,
            unsteady=self._unsteady,
        )
        self.sessions = Sessions(house, self.keeper, registrar)
        context.soft.state = self
        self.watches = Watches(context)
        self._peer_handler = PeerHandler(
            context,
            arrivals=self._forwarded,
            progress=self._told,
            heartbeat=unary.heard,
            history=context.charts.learn,
            interest=lambda told: self._interest.hear(told.job, told.ranks),
        )
        self._leave = context.mirror.subscribe(
            Fanout(
                context,
                board=self._board,
                ranks=ranks,
                barriers=self.barriers,
                sessions=self.sessions,
                keeper=self.keeper,
                peers=self.peers,
            ).take
        )

    async def run(self) -> None:
        """Do what serving needs in the background, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.keeper.run(), name="keeper")
                tasks.create_task(self.barriers.run(), name="barriers")
                tasks.create_task(self.peers.run(), name="peers")
                tasks.create_task(self._tell_progress(), name="progress")
                tasks.create_task(self._context.charts.run(self._board), name="charts")
                tasks.create_task(self._send_away(), name="self-diagnosis")
        finally:
            self._leave()
            self._context.soft.state = None

    async def serve_member(
        self, link: Link[session_pb2.Up, session_pb2.Down], identity: Identity | None = None
    ) -> None:
        """Serve one member's session to its end; `identity` is who opened it, None if nobody asked."""
        await self.sessions.serve(link, identity)

    async def serve_peer(
        self, link: Link[peers_pb2.PeerUp, peers_pb2.PeerDown], identity: Identity | None = None
    ) -> None:
        """Serve one peer's link to its end; `identity` is who opened it, None if nobody asked."""
        await self._peer_handler.serve(link, identity)

    def part(self) -> None:
        """Send every member elsewhere, and declare none of them dead for going."""
        self.keeper.stop()
        self.sessions.part(self.peers.ready_addresses(), "this replica stops")
        self._barrier_calls.part()
        self.watches.stop()
        self._peer_handler.close_all()

    # -- what can be looked at (a `SoftState`)

    async def call(self, name: str, request: Message, identity: Identity | None) -> Any:
        return await self.calls.answer(name, request, ANYBODY, identity)

    def session_count(self) -> int:
        return self.keeper.sessions()

    def hears(self, job: str, worker: str, boot: str) -> bool:
        return self.keeper.hears(job, worker, boot)

    def ready_peers(self) -> Collection[InstanceId]:
        return self.peers.ready()

    def open_rounds(self, job: str) -> Iterator[OpenRound]:
        return self.barriers.open(job)

    def progress(self, job: str, generation: int, ranks: Iterable[int]) -> list[members_pb2.RankProgress]:
        return self._board.ranks(job, generation, ranks)

    def reported(self, job: str) -> tuple[int, Mapping[int, Reported]]:
        return self._board.reported(job)

    def devices(self, job: str) -> Iterator[members_pb2.MemberDevices]:
        return self._board.devices(job)

    def look(self, job: str, rank: int | None = None) -> None:
        self._interest.look(job, rank)

    def heard(self, job: str, worker: str, incarnation: int) -> float | None:
        return self._board.heard(job, worker, incarnation)

    def evidence(self, job: str, generation: int, rank: int) -> members_pb2.RankEvidence | None:
        return self._board.evidence(job, generation, rank)

    def violations(self, job: str) -> Sequence[str]:
        return self._context.invariants.violations(job)

    # -- inside

    def _served(self, job: str) -> Iterator[int]:
        """The sessions know the barriers, so these cannot know the sessions before they exist."""
        return self.sessions.ranks(job)

    def _tick(self, sequence: int) -> session_pb2.Tick:
        """Say how this replica is, and where it is better: nowhere, as far as it knows, if that lost etcd too."""
        elsewhere = self.peers.better_off()
        ready = not elsewhere and self._context.is_ready()[0]
        addresses = self.peers.ready_addresses() if ready else elsewhere
        return session_pb2.Tick(sequence=sequence, ready=ready, ready_addresses=addresses)

    def _unsteady(self) -> str:
        ready, why = self._context.is_ready()
        if not ready:
            return why
        since_s = self._ready_since_s
        if since_s is None or self._context.clock() < since_s + STEADY_S:
            return "it has been ready for a moment only"
        return ""

    def _forwarded(self, arrivals: Iterable[barriers_pb2.Arrival]) -> None:
        for message in arrivals:
            self.barriers.arrive(barrier_wire.arrival(message), None)

    def _told(self, progress: peers_pb2.PeerProgress) -> None:
        if progress.ranks:
            self._board.note(progress.job, progress.generation, progress.ranks, own=False)
        for member in progress.devices:
            self._board.note_devices(progress.job, member, own=False)
        if progress.heard:
            self._board.note_heard(progress.job, progress.heard, own=False)
        if progress.evidence:
            self._board.note_evidence(progress.job, progress.generation, progress.evidence, own=False)

    def _tell_interest(self) -> None:
        """Ask for what is known only while somebody looks: peers, and our own members."""
        for job, ranks in self._interest.own():
            self.peers.send(peers_pb2.PeerUp(interest=peers_pb2.PeerInterest(job=job, ranks=ranks)))
        for job in self._interest.jobs():
            self._board.note_heard(job, self.sessions.heard(job), own=True)
            self._board.note_heard(job, self._unary.last_heard(job), own=True)
        for job, rank in self._interest.ranks():
            self.sessions.inspect(job, rank)

    def _tell_peers_everything(self) -> None:
        self.barriers.forwarding.again()
        self._board.tell_again()

    async def _send_away(self) -> None:
        """While this replica is sick, have its members served by one that is ready (PROTOCOLS 5.5)."""
        while True:
            await asyncio.sleep(TURN_S)
            if not self._context.is_ready()[0]:
                self._ready_since_s = None
            elif self._ready_since_s is None:
                self._ready_since_s = self._context.clock()
            health, addresses = self._context.health, self.peers.better_off()
            if addresses:
                self.sessions.move_all(addresses, health.unready())
            if health.is_cut_off():
                # also where no peer is known to be better: who is not welcomed yet loses nothing by going
                elsewhere = addresses or self.peers.ready_addresses()
                self.sessions.move_registering(elsewhere, health.unready())

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(self._context.timing.tick_s)
            self._tell_interest()
            for news in self._board.news():
                self.peers.send(peers_pb2.PeerUp(progress=news))
