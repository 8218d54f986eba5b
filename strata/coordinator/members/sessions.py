"""The sessions of this replica's members: opens them, sends the world and the saves on them, ends them.

The messages follow from the view, grouped by job. A change of one job costs the sessions of other jobs nothing, and
a message that is the same for all sessions of a job is built once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from strata.coordinator.access.permission import check_session
from strata.coordinator.context import ReplicaContext
from strata.coordinator.members.failure_detector import FailureDetector
from strata.coordinator.members.registrar import Registrar
from strata.coordinator.members.registry import SessionRegistry
from strata.coordinator.members.session import MemberSession, ServingContext
from strata.coordinator.view import floors
from strata.core.access.authority import Identity
from strata.core.checkpoints.corruption import has_open_report
from strata.core.checkpoints.lifecycle import order
from strata.core.ids import checked_id
from strata.core.job import JobView
from strata.core.kv.records import BarrierFloor, CheckpointRecord, CheckpointState, JobPhase, Worker
from strata.core.kv.view import Entry
from strata.core.members.registration import Registration, check_registration
from strata.core.stop.requests import leave_requests, waits_for
from strata.errors import InvalidArgument, StrataError, Unavailable
from strata.observe import get_logger
from strata.session.link import Link
from strata.session.served import End, Limits, Session, serve
from strata.v1 import session_pb2
from strata.v1.session_pb2 import Down, Up
from strata.wire import checkpoints as checkpoint_wire
from strata.wire import members as member_wire
from strata.wire import worlds as world_wire
from strata.wire.enums import PHASES

log = get_logger()

SEALER_NEWS_S: Final = 0.005
"""Acks of one save come in bursts. A burst makes one message to the member that runs rank 0, because rank 0 composes
the global manifest after the last ack. The end of a save is sent to all members immediately."""
OTHERS_NEWS_S: Final = 1.0
"""Other members only display the acks. Sending every ack to every member would cost the square of their number."""
RECENT_CHECKPOINTS: Final = 2
"""How many ended saves of its generation a session receives at its start, since the member may have missed
their end. At most this many saves are in flight at the same time."""


class Sessions:
    """All sessions with members that this replica serves."""

    def __init__(
        self,
        serving: ServingContext,
        registry: SessionRegistry,
        failure_detector: FailureDetector,
        registrar: Registrar,
    ) -> None:
        self._serving = serving
        self._registry = registry
        self._context: ReplicaContext = serving.context
        self._failure_detector = failure_detector
        self._registrar = registrar
        self._acks_for_sealer = _DelayedUpdates(SEALER_NEWS_S, partial(self._send_save, sealer=True))
        self._acks_for_others = _DelayedUpdates(OTHERS_NEWS_S, partial(self._send_save, sealer=False))
        self._limits = Limits(tick_s=serving.context.timing.tick_s)
        self._moved = serving.context.measures.moved.child()
        self._registering: dict[MemberSession, asyncio.Timeout] = {}
        """The timeout scopes of registrations in progress; ending a scope cancels its registration."""
        self._stops = ""
        """The reason to accept no member, once this replica stops; empty before."""

    async def serve(self, link: Link[Up, Down], identity: Identity | None) -> None:
        """Serve one session to its end."""
        await serve(link, partial(self._accept, identity), limits=self._limits)

    def part(self, addresses: Iterable[str], reason: str) -> None:
        """Send every member to another replica, and accept no more."""
        self._stops = reason
        self.move_all(addresses, reason)
        self.move_registering(addresses, reason)

    def move_registering(self, addresses: Iterable[str], reason: str) -> None:
        """Move members that are still registering to another replica: at this one the registration cannot succeed."""
        where = list(addresses)
        for member, scope in self._registering.items():
            if not member.parting:
                self._moved.add()
                member.move(where, reason)
                scope.reschedule(asyncio.get_running_loop().time())

    def move_all(self, addresses: Iterable[str], reason: str) -> None:
        """Send every member to another replica."""
        where = list(addresses)
        for member in self._registry.everybody():
            if not member.parting:
                self._moved.add()
                member.move(where, reason)

    # -- the life of a session

    async def _accept(
        self, identity: Identity | None, hello: session_pb2.Hello, session: Session
    ) -> MemberSession:
        if not hello.HasField("member"):
            raise InvalidArgument(
                "a coordinator serves members; a rank's session goes to its agent",
                hint="connect to the socket in STRATA_SOCKET",
            )
        claimed = hello.member
        check_session(identity, cluster=self._context.keys.cluster, job=claimed.job, worker=claimed.worker_id)
        if hello.if_ready and (why := self._serving.readiness.unsteady()):
            raise Unavailable(f"this replica is not ready: {why}", hint="stay, or try another replica")
        await floors.honour(self._context.mirror, hello.token)
        registration = member_wire.registration(hello.member)
        check_registration(registration)
        job = checked_id("job", hello.member.job)
        member = MemberSession(self._serving, session, job, registration, identity, self._ended)
        if self._stops:
            raise Unavailable(self._stops)
        try:
            entry = await self._register(member, registration, hello.leaving)
            self._open(member, entry)
        except BaseException:
            self._registry.remove(member)
            self._failure_detector.disconnected(member, broke=False)
            raise
        return member

    async def _register(
        self, member: MemberSession, registration: Registration, leaving: bool
    ) -> Entry[Worker]:
        """Register a member. If it is sent to another replica during the registration, this replica must not take
        it back.
        """
        try:
            async with asyncio.timeout(None) as self._registering[member]:
                return await self._registrar.register(member, registration, leaving=leaving)
        except TimeoutError:
            raise Unavailable(f"{member.worker} was sent to another replica", hint="") from None
        finally:
            del self._registering[member]

    def _open(self, member: MemberSession, entry: Entry[Worker]) -> None:
        """Welcome a member and send it all updates that it may have missed."""
        member.welcome(entry)
        self._registry.add(member)
        job = self._context.job(member.job)
        if job.head() is not None or job.view.get(job.keys.phase) is not None:
            self._send_world(job, (member,))
        for save in self._current_saves(job):
            member.send(Down(checkpoint=checkpoint_wire.checkpoint_message(job, save)))
        log.info("session_opened", job=member.job, worker=member.worker, incarnation=member.incarnation)

    def _ended(self, member: MemberSession, end: End) -> None:
        self._registry.remove(member)
        log.info("session_ended", job=member.job, worker=member.worker, incarnation=member.incarnation)
        self._failure_detector.disconnected(member, broke=end is End.BROKEN)

    # -- updates to members

    def on_world(self, job: str) -> None:
        """Send the members of a job its new head or phase, or the request that its ranks stop."""
        if members := self._registry.of(job):
            self._send_world(self._context.job(job), members)

    def on_save(self, job: str, step: int, generation: int) -> None:
        """Send the members of a job a changed save: immediately if the save ended, else after a short delay."""
        if not self._registry.of(job):
            return
        save = (job, step, generation)
        entry = self._context.job(job).checkpoint(step, generation)
        if entry is not None and entry.record.state is not CheckpointState.OPEN:
            self._acks_for_sealer.forget(save)
            self._acks_for_others.forget(save)
            self._send_save(save, sealer=None)
        else:
            self._acks_for_sealer.note(save)
            self._acks_for_others.note(save)

    def _send_world(self, job: JobView, members: Iterable[MemberSession]) -> None:
        head = job.head()
        index = self._serving.ranks.of(job.keys.name)
        phase = job.view.record(job.keys.phase, JobPhase)
        update = session_pb2.WorldUpdate(
            world=None if head is None else world_wire.world_message(job, head.record),
            phase=PHASES[job.phase()],
            phase_reason=phase.reason if phase is not None else "",
            token=floors.token(self._context.mirror),
            barrier_floors=dict(_floors(job, head.record.generation)) if head is not None else {},
            waits=waits_for(job),
        )
        notice, stop_requests = world_wire.notice_of(job), leave_requests(job)
        shared = Down(world=update)
        for member in members:
            place = index.place(member.worker, member.incarnation) if index is not None else None
            own_notice = notice if place is not None else None
            if place is None and stop_requests:
                own_notice = world_wire.notice_for_member(
                    job, stop_requests, member.worker, member.incarnation
                )
            if place is None and own_notice is None:
                member.send(shared)
                continue
            own = Down()
            own.CopyFrom(shared)
            if place is not None:
                own.world.place.CopyFrom(world_wire.place_message(place))
            if own_notice is not None:
                own.world.notice.CopyFrom(own_notice)
            member.send(own)

    def _send_save(self, save: _Save, *, sealer: bool | None) -> None:
        """Send a save. `sealer`: True for the member of rank 0 only, False for all others, None for all members."""
        name, step, generation = save
        job, index = self._context.job(name), self._serving.ranks.of(name)
        entry = job.checkpoint(step, generation)
        if entry is None or index is None:
            return
        if index.head.generation != generation and not has_open_report(job, entry.record):
            return  # a save of an older world concerns this world only if it has a corruption report
        message = Down(checkpoint=checkpoint_wire.checkpoint_message(job, entry))
        for member in self._registry.of(name):
            place = index.place(member.worker, member.incarnation)
            if place is not None and sealer in {None, place.first_rank == 0}:
                member.send(message)

    def _current_saves(self, job: JobView) -> Iterator[Entry[CheckpointRecord]]:
        """Yield saves with a corruption report, the current generation's open saves, and its last ended saves."""
        head = job.head()
        if head is None:
            return
        yield from (e for e in job.checkpoints() if has_open_report(job, e.record))
        saves = [e for e in job.checkpoints() if e.record.generation == head.record.generation]
        ended = [e for e in saves if e.record.state is not CheckpointState.OPEN]
        recent = sorted(ended, key=lambda e: order(e.record))[-RECENT_CHECKPOINTS:]
        yield from (e for e in saves if e.record.state is CheckpointState.OPEN)
        yield from recent


_Save = tuple[str, int, int]
"""Job, step and generation."""


class _DelayedUpdates:
    """Saves that changed, each sent once, `after_s` after the first change."""

    def __init__(self, after_s: float, tell: Callable[[_Save], None]) -> None:
        self._after_s = after_s
        self._send = tell
        self._changed: dict[_Save, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, save: _Save) -> None:
        self._changed[save] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._due)

    def forget(self, save: _Save) -> None:
        self._changed.pop(save, None)

    def _due(self) -> None:
        self._timer = None
        changed, self._changed = self._changed, {}
        for save in changed:
            try:
                self._send(save)
            except StrataError as error:
                log.warning("save_not_delivered", job=save[0], step=save[1], error=error.message)


def _floors(job: JobView, generation: int) -> Iterator[tuple[str, int]]:
    """Yield each barrier's name with its last released round of this generation."""
    for name in job.view.names(job.keys.barriers):
        floor = job.view.record(job.keys.barrier_floor(name, generation), BarrierFloor)
        if floor is not None:
            yield name, floor.round
