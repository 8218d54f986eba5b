"""One member's session at a replica: the messages that each side may send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from strata.coordinator.barriers.rounds import Barriers
from strata.coordinator.calls.table import Caller, Calls, settled
from strata.coordinator.context import ReplicaContext
from strata.coordinator.members.readiness import Readiness
from strata.coordinator.reports.progress import ProgressBoard
from strata.coordinator.view import floors
from strata.coordinator.view.rank_indexes import RankIndex, RankIndexes
from strata.core.access.authority import Identity
from strata.core.barriers.outcomes import BarrierKey
from strata.core.kv.records import Worker
from strata.core.kv.view import Entry
from strata.core.members.membership import decide_leave, decide_rank_exit
from strata.core.members.registration import Registration
from strata.errors import Refused, StaleGeneration, StrataError
from strata.session.served import End, Session
from strata.v1 import barriers_pb2, members_pb2, session_pb2
from strata.v1.session_pb2 import Down
from strata.wire import barriers as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingContext:
    """The parts of a replica that every session uses."""

    context: ReplicaContext
    barriers: Barriers
    board: ProgressBoard
    calls: Calls
    ranks: RankIndexes
    readiness: Readiness


class MemberSession:
    """A handler of `strata.session`, a transport of the failure detector and a waiter of barriers."""

    def __init__(
        self,
        serving: ServingContext,
        session: Session,
        job: str,
        registration: Registration,
        identity: Identity | None,
        on_end: Callable[[MemberSession, End], None],
    ) -> None:
        self.job = job
        self.worker = registration.worker
        self.boot = registration.boot
        self.incarnation = 0
        self._serving = serving
        self._session = session
        self._on_end = on_end
        self._leaving = False
        self._caller = Caller(job=job, worker=registration.worker, incarnation=0, identity=identity)

    # -- messages to the member

    def welcome(self, entry: Entry[Worker]) -> None:
        """Confirm the registration to the member."""
        context = self._serving.context
        self.incarnation = entry.create_revision
        self._caller = replace(self._caller, incarnation=self.incarnation)
        welcome = session_pb2.Welcome(
            token=floors.token(context.mirror),
            incarnation=entry.create_revision,
            replica=context.replica,
            instance=context.instance,
            detect_s=context.timing.detect_s,
        )
        self.send(Down(welcome=welcome))

    @property
    def parting(self) -> bool:
        """Whether this side has already ended the session."""
        return self._session.closed

    def send(self, message: Down) -> None:
        """Queue a message for the member."""
        self._session.send(message)

    def quiet_s(self) -> float:
        return 0.0

    def dismiss(self, error: StrataError) -> None:
        """End the session; permanently, unless the error is retryable."""
        if self._leaving or self._session.closed:
            return
        if error.retryable:
            self._session.close(error)
        else:
            self._session.end(error)

    def move(self, addresses: Iterable[str], reason: str) -> None:
        """Send the member to another replica."""
        self.send(Down(moved=session_pb2.Moved(addresses=addresses, reason=reason)))
        self._session.close()

    @property
    def last_message_s(self) -> float:
        """When the member last sent a message, on the loop's clock."""
        return self._session.last_message_s

    # -- a waiter of barriers

    def outcome(self, key: BarrierKey, message: barriers_pb2.BarrierOutcome) -> None:
        self.send(Down(outcomes=session_pb2.Outcomes(outcomes=[message])))

    def refused(self, key: BarrierKey, ranks: tuple[int, ...], error: StrataError) -> None:
        self.send(Down(arrival_refused=wire.refused_message(key, ranks, error)))

    # -- messages from the member

    def arrivals(self, arrivals: Sequence[barriers_pb2.Arrival]) -> None:
        index = self._serving.ranks.of(self.job)
        mine = index.ranks(self.worker, self.incarnation) if index is not None else range(0)
        current = index.head.generation if index is not None else 0
        for message in arrivals:
            arrival = wire.arrival(message)
            if arrival.job != self.job:
                refusal = Refused(f"this session belongs to job {self.job}")
            elif arrival.generation == current and not all(rank in mine for rank in arrival.ranks):
                refusal = self._wrong_rank_error(index, arrival.ranks)
            else:
                self._serving.barriers.arrive(arrival, self)
                continue
            self.refused(arrival.key, arrival.ranks, refusal)

    def _wrong_rank_error(self, index: RankIndex | None, ranks: tuple[int, ...]) -> Refused:
        """Return the refusal of an arrival at the current generation for ranks that this member does not run.

        A member that was declared dead and then registered again is no longer in the world, although the next
        world is not written yet. For such a member's ranks the generation has ended.
        """
        if index is not None and index.had(self.worker, self.incarnation):
            return StaleGeneration(
                f"{self.worker} was declared dead in generation {index.head.generation}, which therefore ends",
                hint="wait for the next world, which has a place for it again",
            )
        return Refused(f"{self.worker} does not run all of these ranks: {ranks}")

    def progress(self, progress: session_pb2.Progress) -> None:
        board = self._serving.board
        if progress.devices:
            devices = members_pb2.MemberDevices(
                worker_id=self.worker, incarnation=self.incarnation, devices=progress.devices
            )
            board.note_devices(self.job, devices, own=True)
        index = self._serving.ranks.of(self.job)
        if index is None or index.head.generation != progress.generation:
            return
        mine = index.ranks(self.worker, self.incarnation)
        evidence = [each for each in progress.evidence if each.rank in mine]
        if evidence:
            board.note_evidence(self.job, progress.generation, evidence, own=True)
        ranks = [reported for reported in progress.ranks if reported.rank in mine]
        board.note(self.job, progress.generation, ranks, own=True)

    async def rank_exit(self, rank_exit: session_pb2.RankExit) -> session_pb2.Reply:
        ended = rank_exit
        await settled(
            self._serving.context,
            self.job,
            lambda job: decide_rank_exit(
                job,
                self.worker,
                self.incarnation,
                ended.generation,
                ended.rank,
                ended.code,
                ended.reason,
                early=ended.early,
            ),
        )
        return session_pb2.Reply(token=floors.token(self._serving.context.mirror), done=session_pb2.Done())

    async def call(self, call: session_pb2.Call) -> session_pb2.Reply:
        return await self._serving.calls.reply(call, self._caller)

    async def leave(self, leave: session_pb2.Leave) -> None:  # the reason is not recorded
        self._leaving = True
        try:
            await settled(
                self._serving.context, self.job, lambda job: decide_leave(job, self.worker, self.incarnation)
            )
            self._serving.context.measures.removals.child("left").add()
        except StrataError:
            self._leaving = False
            raise

    def tick(self, sequence: int) -> session_pb2.Tick:
        return self._serving.readiness.tick(sequence)

    def ended(self, end: End) -> None:
        self._serving.barriers.forget(self, self.job)
        self._on_end(self, end)
