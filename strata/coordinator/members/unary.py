"""Members without a session: Register, then a Heartbeat well within `detect_s` (PROTOCOLS 5.8).

A client that is silent for `detect_s` has lost its transport, and the failure detector treats it like a broken stream.

A heartbeat may come to any replica, so that a client can spread its calls. A replica that receives a heartbeat for
another replica's member forwards the heartbeat, and answers "alive" only once the serving replica has received it.
Otherwise the client could trust the answer while the serving replica counts `detect_s` of silence. If the serving
replica is lost, does not answer or does not know the member, the heartbeat causes a hand-over (5.2): a guarded write,
after which the key names this replica. So an answered heartbeat has always reached the replica in `served_by`.

A *bare* heartbeat names neither boot nor incarnation. It is meant for programs that know no other call. The
first bare heartbeat registers its worker; only the worker's name identifies the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final

from strata.coordinator.calls.pages import PAGE_BYTES, page
from strata.coordinator.calls.table import Row, as_it_is, change
from strata.coordinator.context import ReplicaContext, existing_job
from strata.coordinator.members.failure_detector import FailureDetector
from strata.coordinator.members.registrar import Registrar
from strata.coordinator.reports.progress import ProgressBoard
from strata.coordinator.view.rank_indexes import RankIndexes
from strata.core.access.authority import Identity
from strata.core.ids import BootId, InstanceId, WorkerId, checked_id
from strata.core.job import JobView
from strata.core.kv.records import Worker
from strata.core.kv.view import Entry
from strata.core.members.membership import decide_leave, decide_rank_exit
from strata.core.members.registration import DEFAULT_JOB, Registration, bare_registration, check_registration
from strata.core.stop.requests import leave_notice, leave_requests
from strata.errors import NotFound, StaleIncarnation, StrataError, Unavailable
from strata.v1 import members_pb2 as pb
from strata.v1 import peers_pb2, worlds_pb2
from strata.wire import members as wire
from strata.wire import worlds as world_wire
from strata.wire.enums import PHASES

SITUATIONS: Final = 64
"""The number of jobs whose heartbeat answer is cached until the view changes; an answer has about 200 bytes."""
Relay = Callable[[InstanceId, peers_pb2.PeerHeartbeat], Awaitable[bool]]
"""Forwards a heartbeat to another replica; returns whether that replica serves the member and received it."""


class VirtualSession:
    """A session without a stream: the failure detector ends it `detect_s` after the last heartbeat."""

    def __init__(self, job: str, worker: str, boot: str, failure_detector: FailureDetector) -> None:
        self.job = job
        self.worker = WorkerId(worker)
        self.boot = BootId(boot)
        self.incarnation = 0
        self._failure_detector = failure_detector
        self._last_message_s: float | None = None

    def touch(self) -> None:
        """Record a sign of life."""
        self._last_message_s = asyncio.get_running_loop().time()

    def dismiss(self, error: StrataError) -> None:  # the member's next heartbeat receives the reason
        self._failure_detector.disconnected(self, broke=False)

    @property
    def last_message_s(self) -> float:
        now_s = asyncio.get_running_loop().time()
        return (
            now_s if self._last_message_s is None else self._last_message_s
        )  # None: its first call is in progress

    def quiet_s(self) -> float:
        return asyncio.get_running_loop().time() - self.last_message_s


class UnaryMembers:
    """Answers the methods of the gRPC service `Members`."""

    def __init__(
        self,
        context: ReplicaContext,
        failure_detector: FailureDetector,
        registrar: Registrar,
        ranks: RankIndexes,
        board: ProgressBoard,
        *,
        relay: Relay,
        elsewhere: Callable[[], Sequence[str]],
    ) -> None:
        self._context = context
        self._failure_detector = failure_detector
        self._registrar = registrar
        self._ranks = ranks
        self._board = board
        self._relay = relay
        self._elsewhere = elsewhere
        self._job_answer = lru_cache(maxsize=SITUATIONS)(self._job_answer_at)

    def rows(self) -> Iterator[Row]:
        yield Row(method="Members.Register", answer=self.register)
        yield Row(method="Members.Heartbeat", answer=self.heartbeat, default_job=DEFAULT_JOB)
        yield change(
            self._context,
            "Members.ReportRankExit",
            as_it_is,
            lambda job, r: decide_rank_exit(
                job, WorkerId(r.worker_id), r.incarnation, r.generation, r.rank, r.code, r.reason
            ),
            exists=True,
        )
        yield change(
            self._context,
            "Members.Leave",
            as_it_is,
            lambda job, r: decide_leave(job, WorkerId(r.worker_id), r.incarnation),
            self._left,
        )
        yield Row(method="Members.ListMembers", answer=self.list_members)

    def _left(self, _job: JobView, _request: pb.LeaveRequest) -> Mapping[str, object]:
        self._context.measures.removals.child("left").add()
        return {}

    async def register(self, request: pb.RegisterRequest, _identity: Identity | None) -> pb.RegisterResponse:
        registration = wire.registration(request.registration)
        check_registration(registration)
        job = checked_id("job", request.registration.job)
        incarnation = await self._register(job, registration)
        timing = self._context.timing
        return pb.RegisterResponse(
            incarnation=incarnation,
            detect_s=timing.detect_s,
            heartbeat_s=timing.heartbeat_s,
            world=self._world(job),
        )

    async def heartbeat(
        self, request: pb.HeartbeatRequest, _identity: Identity | None
    ) -> pb.HeartbeatResponse:
        self._check_health()
        if request.boot or request.incarnation:
            await self._keep_alive(request)
        else:
            await self._bare(request)
        index = self._ranks.of(request.job)
        place = None if index is None else index.place(request.worker_id, request.incarnation)
        if index is not None and index.head.generation == request.generation:
            mine = index.ranks(request.worker_id, request.incarnation)
            reported = [progress for progress in request.ranks if progress.rank in mine]
            self._board.note(request.job, request.generation, reported, own=True)
        response = pb.HeartbeatResponse()
        response.CopyFrom(self._job_answer(request.job, self._context.mirror.view.state))
        if place is not None:
            response.place.CopyFrom(world_wire.place_message(place))
            return response
        response.ClearField("notice")
        view = self._context.job(request.job)
        leave = world_wire.notice_for_member(
            view, leave_requests(view), request.worker_id, request.incarnation
        )
        if leave is not None:
            response.notice.CopyFrom(leave)
        return response

    def record_heartbeat(self, heartbeat: peers_pb2.PeerHeartbeat | pb.HeartbeatRequest) -> bool:
        """True if this incarnation has a transport here; record the heartbeat if the transport is a virtual
        session.

        The transport ends once the view shows that another replica took the member over. That hand-over followed a
        heartbeat of the same client, and the token in the client's next call makes this view catch up first.
        """
        transport = self._failure_detector.find(heartbeat.job, heartbeat.worker_id, heartbeat.boot)
        if transport is None or transport.incarnation != heartbeat.incarnation:
            return False
        if isinstance(transport, VirtualSession):
            transport.touch()
        return True

    async def list_members(
        self, request: pb.ListMembersRequest, _identity: Identity | None
    ) -> pb.ListMembersResponse:
        job = await existing_job(self._context, request.job)
        index = self._ranks.of(request.job)
        generation = 0 if index is None else index.head.generation
        stop_requests = leave_requests(job)

        def member(entry: Entry[Worker]) -> pb.Member:
            ranks = range(0) if index is None else index.ranks(entry.name, entry.create_revision)
            reported = self._board.ranks(request.job, generation, ranks)
            devices = self._board.devices_of(request.job, entry.name, entry.create_revision)
            leaving = leave_notice(stop_requests, entry.name, entry.create_revision) is not None
            message = wire.member_message(entry, standby=not ranks, leaving=leaving, devices=devices)
            message.ranks.extend(_as_fit(reported, PAGE_BYTES - message.ByteSize()))
            return message

        members, after = page(
            job.workers(),
            key=lambda entry: entry.name,
            make=member,
            size=request.page_size,
            token=request.page_token,
        )
        return pb.ListMembersResponse(members=members, next_page_token=after)

    # -- inside

    def _check_health(self) -> None:
        """Send the caller to a ready replica, if there is one and this replica is not ready (5.5)."""
        if addresses := self._elsewhere():
            why = self._context.health.unready()
            raise Unavailable(f"this replica is not ready: {why}", hint=f"go on at {', '.join(addresses)}")

    async def _register(self, job: str, registration: Registration) -> int:
        """Register a member that sends heartbeats; return its incarnation.

        The request is a sign of life, even if its caller no longer waits or the outcome is unknown: the write may
        still make this replica the one that serves the member.
        """
        transport = VirtualSession(job, registration.worker, registration.boot, self._failure_detector)
        refused = False
        try:
            entry = await self._registrar.register(transport, registration)
            transport.incarnation = entry.create_revision
        except StrataError as error:
            refused = not error.retryable
            raise
        finally:
            if refused:
                self._failure_detector.disconnected(transport, broke=False)
            else:
                transport.touch()
        return transport.incarnation

    async def _keep_alive(self, request: pb.HeartbeatRequest) -> None:
        """Deliver the heartbeat to the replica that serves this incarnation; if there is none, take over the member."""
        if not self.record_heartbeat(request) and not await self._forward(request):
            entry = await self._registered(request)
            await self._register(request.job, _registration(entry))

    async def _bare(self, request: pb.HeartbeatRequest) -> None:
        """Answer a heartbeat that names neither boot nor incarnation; fill both into `request`.

        If such a heartbeat made the worker's key, keep the key alive. Without a key, register the worker.
        """
        registration = bare_registration(WorkerId(request.worker_id))
        check_registration(registration)
        job = checked_id("job", request.job)
        request.boot = registration.boot
        entry = self._context.job(job).worker(request.worker_id)
        if entry is not None and entry.record.boot == registration.boot:
            request.incarnation = entry.create_revision
            with suppress(NotFound, StaleIncarnation):  # the key was removed after the look-up
                await self._keep_alive(request)
                return
        request.incarnation = await self._register(job, registration)

    async def _forward(self, request: pb.HeartbeatRequest) -> bool:
        """True if the replica that serves this incarnation, according to the view, received the heartbeat."""
        entry = self._context.job(request.job).worker(request.worker_id)
        if entry is None or entry.record.served_by == self._context.instance:
            return False
        if (entry.record.boot, entry.create_revision) != (request.boot, request.incarnation):
            return False
        heartbeat = peers_pb2.PeerHeartbeat(
            job=request.job,
            worker_id=request.worker_id,
            boot=request.boot,
            incarnation=request.incarnation,
        )
        return await self._relay(entry.record.served_by, heartbeat)

    async def _registered(self, request: pb.HeartbeatRequest) -> Entry[Worker]:
        """Return the caller's worker key from a fresh view."""
        await self._context.mirror.fresh()
        entry = self._context.job(request.job).worker(request.worker_id)
        if entry is None:
            raise NotFound(f"{request.worker_id} is not registered (any more)", hint="register again")
        if (entry.record.boot, entry.create_revision) != (request.boot, request.incarnation):
            raise StaleIncarnation(f"{request.worker_id} was replaced by {entry.create_revision}")
        return entry

    def _job_answer_at(self, job: str, _state: int) -> pb.HeartbeatResponse:
        """Return the common part of the answers to heartbeats of members with a place in the world, at one state
        of the view.
        """
        view = self._context.job(job)
        phase, reason = world_wire.phase_of(view)
        return pb.HeartbeatResponse(
            world=self._world(job),
            phase=PHASES[phase],
            phase_reason=reason,
            notice=world_wire.notice_of(view),
        )

    def _world(self, job: str) -> worlds_pb2.World | None:
        view = self._context.job(job)
        head = view.head()
        return None if head is None else world_wire.world_message(view, head.record)


def _as_fit(reported: Iterable[pb.RankProgress], left_bytes: int) -> Iterator[pb.RankProgress]:
    """Yield the ranks' progress while it fits, without stacks and trace files that are too large."""
    for one in reported:
        if one.ByteSize() > left_bytes // 4:
            one.ClearField("stack")
            one.ClearField("trace_file")
        left_bytes -= one.ByteSize() + 8  # with the tag and length of the field
        if left_bytes < 0:
            return
        yield one


def _registration(entry: Entry[Worker]) -> Registration:
    """Return the registration that a member's key records, for a hand-over."""
    record = entry.record
    return Registration(
        worker=WorkerId(entry.name),
        boot=record.boot,
        host=record.host,
        slots=record.slots,
        devices=record.devices,
        pid=record.pid,
        cannot_restart=record.cannot_restart,
        incarnation=entry.create_revision,
    )
