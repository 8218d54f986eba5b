"""The serving half of a replica without its transport. The simulation runs it unchanged.

links and requests ──▶ Service ──▶ sessions, barriers, watches, calls
                                           ▲
mirror ──▶ Fanout ─────────────────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from strata.coordinator.barriers.rounds import Barriers
from strata.coordinator.calls.barriers import BarrierCalls
from strata.coordinator.calls.checkpoints import catalog
from strata.coordinator.calls.datasets import DatasetCalls
from strata.coordinator.calls.recovery import RecoveryCalls
from strata.coordinator.calls.retention import retention
from strata.coordinator.calls.table import NO_SESSION, Calls
from strata.coordinator.calls.watches import Watches
from strata.coordinator.calls.worlds import WorldCalls
from strata.coordinator.context import ReplicaContext
from strata.coordinator.fanout import Fanout
from strata.coordinator.members.failure_detector import FailureDetector
from strata.coordinator.members.readiness import Readiness
from strata.coordinator.members.registrar import Registrar
from strata.coordinator.members.registry import SessionRegistry
from strata.coordinator.members.session import ServingContext
from strata.coordinator.members.sessions import Sessions
from strata.coordinator.members.unary import UnaryMembers
from strata.coordinator.peers.handler import PeerHandler
from strata.coordinator.peers.links import Dial, PeerLinks
from strata.coordinator.peers.registry import PeerRegistry
from strata.coordinator.reports.interest import Interest
from strata.coordinator.reports.progress import ProgressBoard
from strata.coordinator.status.live_state import LiveState
from strata.coordinator.view.rank_indexes import RankIndexes
from strata.core.access.authority import Identity
from strata.core.leadership.replica_health import TURN_S
from strata.errors import Unavailable
from strata.session.link import Link
from strata.v1 import barriers_pb2, peers_pb2, session_pb2
from strata.wire import barriers as barrier_wire


class Service:
    """Serves sessions, peers, watches and requests while `run` runs, over any transport."""

    def __init__(self, context: ReplicaContext, dial: Dial) -> None:
        self._context = context
        self._running = False
        self._ranks = ranks = RankIndexes(context.mirror.view, context.keys)
        self.board = board = ProgressBoard()
        self._interest = Interest()
        self._registry = SessionRegistry(ranks)
        self.peers = PeerRegistry(context)
        self.failure_detector = FailureDetector(context)
        self._readiness = Readiness(context, self.peers)
        self.barriers = Barriers(
            context,
            ranks,
            forward=self.peers.forward,
            ready=self.peers.ready,
            phases=board.phases,
            served=self._registry.ranks,
        )
        self._links = PeerLinks(context, dial, self.peers, self._resend_to_peers)
        self.live = LiveState(
            session_count=self.failure_detector.sessions,
            ready_peers=self.peers.ready,
            open_rounds=self.barriers.open,
            progress=board.ranks,
            reported=board.reported,
            devices=board.devices,
            look=self._interest.look,
            last_seen=board.last_seen,
            member_ages=self.failure_detector.ages,
            evidence=board.evidence,
            violations=context.invariants.violations,
        )
        registrar = Registrar(context, self.failure_detector)
        unary = UnaryMembers(
            context,
            self.failure_detector,
            registrar,
            ranks,
            board,
            relay=self.peers.heartbeat,
            elsewhere=self.peers.better_off,
        )
        self._barrier_calls = BarrierCalls(context, ranks, self.barriers)
        self.rows = (
            *catalog(context),
            *retention(context),
            *WorldCalls(context, self.live).rows(),
            *RecoveryCalls(context).rows(),
            *DatasetCalls(context).rows(),
            *unary.rows(),
            *self._barrier_calls.rows(),
        )
        self.calls = Calls(context.mirror, self.rows, cluster=context.keys.cluster)
        serving = ServingContext(
            context=context,
            barriers=self.barriers,
            board=board,
            calls=self.calls,
            ranks=ranks,
            readiness=self._readiness,
        )
        self.sessions = Sessions(serving, self._registry, self.failure_detector, registrar)
        self.watches = Watches(context)
        self._peer_handler = PeerHandler(
            context,
            arrivals=self._forwarded,
            progress=self._note_peer_progress,
            heartbeat=unary.record_heartbeat,
            history=context.charts.learn,
            interest=lambda watched: self._interest.record_peer(watched.job, watched.ranks),
        )
        self._fanout = Fanout(
            context,
            board=board,
            ranks=ranks,
            barriers=self.barriers,
            sessions=self.sessions,
            failure_detector=self.failure_detector,
            links=self._links,
        )

    async def run(self) -> None:
        """Run the background tasks of serving until cancelled."""
        leave = self._context.mirror.subscribe(self._fanout.take)
        self._ranks.forget_all()  # a call before `run` may have filled the index
        self._running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.failure_detector.run(), name="failure-detector")
                tasks.create_task(self.barriers.run(), name="barriers")
                tasks.create_task(self._links.run(), name="peers")
                tasks.create_task(self._send_progress(), name="progress")
                tasks.create_task(self._context.charts.run(self.board), name="charts")
                tasks.create_task(self._move_members_while_unready(), name="self-diagnosis")
        finally:
            self._running = False
            leave()

    async def serve_member(
        self, link: Link[session_pb2.Up, session_pb2.Down], identity: Identity | None = None
    ) -> None:
        """Serve one member's session to its end; `identity` is the caller's, or None if it was not authenticated."""
        await self.sessions.serve(link, identity)

    async def serve_peer(
        self, link: Link[peers_pb2.PeerUp, peers_pb2.PeerDown], identity: Identity | None = None
    ) -> None:
        """Serve one peer's link to its end; `identity` is the caller's, or None if it was not authenticated."""
        await self._peer_handler.serve(link, identity)

    def part(self) -> None:
        """Send every member to another replica. A member that moves is not removed as dead."""
        self.failure_detector.stop()
        self.sessions.part(self.peers.ready_addresses(), "this replica stops")
        self._barrier_calls.part()
        self.watches.stop()
        self._peer_handler.close_all()

    async def call(self, name: str, request: Message, identity: Identity | None) -> Any:
        """Answer a unary call as if it came over gRPC; `Unavailable` while this replica does not serve."""
        if not self._running:
            raise Unavailable("this replica does not serve yet, or no longer", hint="try another replica")
        return await self.calls.answer(name, request, NO_SESSION, identity)

    # -- inside

    def _forwarded(self, arrivals: Iterable[barriers_pb2.Arrival]) -> None:
        for message in arrivals:
            self.barriers.arrive(barrier_wire.arrival(message), None)

    def _note_peer_progress(self, progress: peers_pb2.PeerProgress) -> None:
        if progress.ranks:
            self.board.note(progress.job, progress.generation, progress.ranks, own=False)
        for member in progress.devices:
            self.board.note_devices(progress.job, member, own=False)
        if progress.last_seen:
            self.board.note_last_seen(progress.job, progress.last_seen, own=False)
        if progress.evidence:
            self.board.note_evidence(progress.job, progress.generation, progress.evidence, own=False)

    def _request_watched_reports(self) -> None:
        """Request the reports that are collected only while somebody views them, from peers and own members."""
        for job, ranks in self._interest.own():
            self.peers.send(peers_pb2.PeerUp(interest=peers_pb2.PeerInterest(job=job, ranks=ranks)))
        for job in self._interest.jobs():
            self.board.note_last_seen(job, self.failure_detector.last_seen(job), own=True)
        for job, rank in self._interest.ranks():
            self._registry.inspect(job, rank)

    def _resend_to_peers(self) -> None:
        self.barriers.forwarding.again()
        self.board.resend()

    async def _move_members_while_unready(self) -> None:
        """While this replica is unhealthy, move its members to a ready replica (PROTOCOLS 5.5)."""
        while True:
            await asyncio.sleep(TURN_S)
            self._readiness.note()
            health, addresses = self._context.health, self.peers.better_off()
            if addresses:
                self.sessions.move_all(addresses, health.unready())
            if health.is_cut_off():
                # also if no peer is known to be healthier: a member that is not yet welcomed loses nothing by
                # moving
                elsewhere = addresses or self.peers.ready_addresses()
                self.sessions.move_registering(elsewhere, health.unready())

    async def _send_progress(self) -> None:
        while True:
            await asyncio.sleep(self._context.timing.tick_s)
            self._request_watched_reports()
            for news in self.board.news():
                self.peers.send(peers_pb2.PeerUp(progress=news))
