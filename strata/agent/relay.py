"""The relay: ranks speak to their agent, whose one session upward carries for all of them.

A rank opens the same kind of session to this relay as a member opens to a coordinator. What it
says goes up as it is (the session upward puts arrivals of one round into one message); outcomes,
checkpoints and worlds that come down are handed to every rank of their generation. So the loss of
a coordinator is met in one place, and a rank never notices.

A rank that can go on in a newer generation by itself is told its place there (`move`), and attaches
again; its local rank is what stays.

A rank whose connection ended from its side without a farewell, whose process lives, and that does not attach again
within the grace, is evicted. An end that this side made proves nothing of the rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from strata.agent import forwarding
from strata.agent.environment import Place
from strata.agent.forwarding import Carrier
from strata.agent.rank_process import RankProcess
from strata.core.exit_codes import DO_NOT_REQUEUE, PREEMPTED
from strata.errors import ClusterRestored, InvalidArgument, Refused, StaleGeneration, StrataError
from strata.observe import get_logger
from strata.session.served import End, Handler, Session
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.members_pb2 import RankProgress
from strata.v1.session_pb2 import (
    Call,
    Down,
    Hello,
    Leave,
    Outcomes,
    Progress,
    RankExit,
    RankHello,
    RankPlace,
    Reply,
    Tick,
    Welcome,
    WorldUpdate,
)

EXIT_S: Final = 30.0
"""For how long a process that ends may free its memory, after its connection has ended."""

log = get_logger()

INSTANCE = "supervisor"


class Upstream(forwarding.Upstream, Protocol):
    """What the relay needs of the session with the coordinators."""

    @property
    def world(self) -> WorldUpdate | None:
        """The newest world known."""
        ...

    @property
    def connected(self) -> bool:
        """Whether a coordinator serves the session at this moment."""
        ...


class Listener(Protocol):
    """Who hears what ranks say of themselves, and passes it on."""

    def hear(self, generation: int, ranks: Sequence[RankProgress]) -> None:
        """Take note of how far ranks are, and tell the coordinators."""
        ...

    def gone(self, generation: int, rank: int) -> None:
        """Take note that a rank said farewell; its process may live on."""
        ...


class Ranks(Protocol):
    """This node's ranks, as whoever starts them knows them. A rank is named by its number and its generation."""

    def rank_attached(self, rank: int, generation: int) -> None:
        """Take note that a rank was let in: one that goes on by itself has arrived."""
        ...

    def rank_supports_graceful_stop(self, rank: int, generation: int) -> None:
        """Take note that a rank stops by itself when its generation is asked to."""
        ...

    def rank_stepped(self, rank: int, generation: int) -> None:
        """Take note that a rank has made a step."""
        ...

    def rank_cannot_go_on(self, rank: int, generation: int, reason: str) -> None:
        """Take note that a rank is about to end for a reason that another try would meet again."""
        ...

    def rank_stopped(self, rank: int, generation: int) -> None:
        """Take note that a rank has stopped as it was asked to, whatever its process ends with."""
        ...

    def may_ask_to_stop(self) -> bool:
        """Tell whether a rank that asks for a common stop speaks for the job, and is not just being ended here."""
        ...

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """Kill a rank of this generation for a reason that its exit carries."""
        ...


class Processes(Protocol):
    """Who watches the processes of ranks."""

    def watch(self, rank: int, generation: int, process: RankProcess) -> None:
        """Watch `process` as this rank, in place of any process that was this rank before."""
        ...

    def forget(self) -> None:
        """Watch no process any more."""
        ...


class Relay:
    """Lets in the ranks of the current place, and carries between them and the session upward."""

    def __init__(
        self,
        upstream: Upstream,
        ranks: Ranks,
        *,
        worker_id: str,
        detect_s: float,
        grace_s: float,
        listener: Listener,
        processes: Processes,
    ) -> None:
        self._upstream = upstream
        self.ranks = ranks
        self._listener = listener
        self._watch = processes
        self._worker_id = worker_id
        self._detect_s = detect_s
        self._grace_s = grace_s
        self._place: Place | None = None
        self._attached: dict[int, _RankHandler] = {}
        """By local rank, which a process keeps from one generation to the next."""
        self._processes: dict[int, RankProcess] = {}
        """By rank of the current place: who attached last."""
        self._graces: dict[int, asyncio.TimerHandle] = {}

    # -- from the supervisor and the session upward

    def set_place(self, place: Place | None) -> None:
        """Let in the ranks of `place` from now on, and no others; None: nobody."""
        self._place = place
        self._processes.clear()
        self._watch.forget()
        for timer in self._graces.values():
            timer.cancel()
        self._graces.clear()

    def process(self, rank: int) -> RankProcess | None:
        """Return the process that attached last as this rank of the current place, if one did."""
        return self._processes.get(rank)

    def in_process(self) -> frozenset[int]:
        """Return the local ranks that are attached and can go on in another generation."""
        return frozenset(local for local, handler in self._attached.items() if handler.in_process)

    def move(self, place: Place, local_ranks: Collection[int]) -> None:
        """Tell these local ranks, of the generation before, their place in this one."""
        for local in local_ranks:
            if (handler := self._attached.get(local)) is not None:
                handler.session.send(
                    Down(
                        place=RankPlace(
                            world=place.world,
                            member=place.member,
                            local_rank=local,
                            master_addr=place.master_addr,
                            master_port=place.master_port,
                        )
                    )
                )

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        """Hand a round's outcome to the ranks of its generation."""
        self._tell(outcome.generation, Down(outcomes=Outcomes(outcomes=[outcome])))

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Hand what is new of a checkpoint to the ranks of its generation."""
        self._tell(checkpoint.generation, Down(checkpoint=checkpoint))

    def on_world(self, update: WorldUpdate) -> None:
        """Hand the world to every rank: that of a newer one ends their generation."""
        for handler in self._attached.values():
            handler.session.send(Down(world=update))

    def _tell(self, generation: int, message: Down) -> None:
        for handler in self._attached.values():
            if handler.generation == generation:
                handler.session.send(message)

    # -- from the ranks

    async def accept(self, hello: Hello, session: Session, process: RankProcess | None = None) -> Handler:
        """Attach the rank that says hello, or refuse it: what `session.served.serve` calls.

        `process` is the one that dialled; a simulation has none.
        """
        place, rank = self._place, hello.rank
        if not hello.HasField("rank"):
            raise InvalidArgument("only ranks of this node are served here")
        local = self._check(place, rank)
        if process is not None:
            self._take(rank, process)
        before = self._attached.pop(local, None)
        if before is not None:
            before.session.close()
        handler = _RankHandler(self, rank, local, session)
        self._attached[local] = handler
        self.ranks.rank_attached(rank.rank, rank.generation)
        if (timer := self._graces.pop(rank.rank, None)) is not None:
            timer.cancel()
        session.send(
            Down(
                welcome=Welcome(
                    token=self._upstream.token,
                    incarnation=place.member.incarnation if place is not None else 0,
                    replica=self._worker_id,
                    instance=INSTANCE,
                    detect_s=self._detect_s,
                )
            )
        )
        if self._upstream.world is not None:
            session.send(Down(world=self._upstream.world))
        log.debug("rank.attached", rank=rank.rank, generation=rank.generation)
        return handler

    def _check(self, place: Place | None, rank: RankHello) -> int:
        """Return the local rank of one that may attach."""
        if place is None or rank.generation != place.generation:
            now = f"generation {place.generation}" if place is not None else "none"
            raise StaleGeneration(f"{self._worker_id} runs {now}, not generation {rank.generation}")
        if rank.job != place.job or rank.worker_id != place.worker_id or rank.rank not in place.ranks:
            raise Refused(
                f"rank {rank.rank} of {rank.worker_id} in job {rank.job} is not run by {self._worker_id}",
                hint="a rank takes its STRATA_* variables from strata run, unchanged",
            )
        return place.ranks.index(rank.rank)

    def _take(self, rank: RankHello, process: RankProcess) -> None:
        """Take note of a rank's process; `Refused` while another one that was this rank lives."""
        holder = self._processes.get(rank.rank)
        if holder is not None and holder.alive:
            if holder.pid != process.pid:
                raise Refused(
                    f"rank {rank.rank} is process {holder.pid}; process {process.pid} is refused while that one lives",
                    hint="a rank is the process that attaches first; unset STRATA_SOCKET for programs that run beside it",
                )
            return
        self._processes[rank.rank] = process
        self._watch.watch(rank.rank, rank.generation, process)

    def may_ask_to_stop(self, generation: int) -> bool:
        """Tell whether a rank of this generation that asks for a common stop speaks for the job."""
        runs = self._place is not None and self._place.generation == generation
        return runs and self.ranks.may_ask_to_stop()

    def _detached(self, handler: _RankHandler, end: End) -> None:
        rank, generation = handler.rank, handler.generation
        if self._attached.get(handler.local_rank) is not handler:
            return
        del self._attached[handler.local_rank]
        current = self._place is not None and self._place.generation == generation
        if end is not End.BROKEN or handler.session.ended_here:
            self._listener.gone(generation, rank)
        elif current:
            self._graces[rank] = asyncio.get_running_loop().call_later(
                self._grace_s, self._grace_over, rank, generation, self._grace_s
            )

    def _grace_over(self, rank: int, generation: int, waited_s: float) -> None:
        self._graces.pop(rank, None)
        process = self._processes.get(rank)
        if process is not None and not process.alive:
            return  # whoever started it waits for it, and says how it ended
        if process is not None and process.exiting and waited_s < EXIT_S:
            # the same, once the kernel has freed its memory: a device's may take seconds
            self._graces[rank] = asyncio.get_running_loop().call_later(
                self._grace_s, self._grace_over, rank, generation, waited_s + self._grace_s
            )
            return
        if self._place is not None and self._place.ranks.index(rank) not in self._attached:
            reason = f"its connection ended, and it did not attach again within {self._grace_s:g} s"
            self.ranks.evict(rank, generation, reason)


class _RankHandler(Carrier):
    """What one rank says (`session.served.Handler`)."""

    upstream: Upstream

    def __init__(self, relay: Relay, hello: RankHello, local_rank: int, session: Session) -> None:
        self._relay = relay
        self.upstream = relay._upstream  # the relay's other half
        self._job = hello.job
        self.rank = hello.rank
        self.local_rank = local_rank
        self.in_process = hello.in_process
        self.generation = hello.generation
        self.session = session

    def check_arrival(self, arrival: Arrival) -> None:
        if list(arrival.ranks) != [self.rank] or arrival.generation != self.generation:
            raise InvalidArgument(f"rank {self.rank} of generation {self.generation} arrives for itself only")

    def progress(self, progress: Progress) -> None:
        mine = [one for one in progress.ranks if one.rank == self.rank]
        if progress.generation == self.generation and mine:
            if any(one.supports_graceful_stop for one in mine):
                self._relay.ranks.rank_supports_graceful_stop(self.rank, self.generation)
            if any(one.step > 0 for one in mine):
                self._relay.ranks.rank_stepped(self.rank, self.generation)
            self._relay._listener.hear(self.generation, mine)  # the relay's other half

    async def rank_exit(self, rank_exit: RankExit) -> Reply:
        mine = (rank_exit.rank, rank_exit.generation) == (self.rank, self.generation)
        if not mine or rank_exit.code not in {PREEMPTED, DO_NOT_REQUEUE}:
            raise Refused("a rank's end is reported by the supervisor that waits for its process")
        if rank_exit.code == PREEMPTED:
            self._relay.ranks.rank_stopped(self.rank, self.generation)
        else:
            self._relay.ranks.rank_cannot_go_on(self.rank, self.generation, rank_exit.reason)
        return Reply(token=self.upstream.token)

    async def call(self, call: Call) -> Reply:
        if call.HasField("stop_job") and not self._relay.may_ask_to_stop(self.generation):
            raise StaleGeneration(f"this node's ranks of generation {self.generation} are being ended")
        try:
            return await super().call(call)
        except ClusterRestored as error:
            raise _ended_by(error) from error

    def _refuse(self, arrival: Arrival, error: StrataError) -> None:
        super()._refuse(arrival, _ended_by(error) if isinstance(error, ClusterRestored) else error)

    async def leave(self, leave: Leave) -> None:
        log.debug("rank.detached", rank=self.rank, generation=self.generation, reason=leave.reason)

    def tick(self, sequence: int) -> Tick:
        return Tick(sequence=sequence, ready=self.upstream.connected)

    def ended(self, end: End) -> None:
        self._relay._detached(self, end)  # the relay's other half


def _ended_by(error: ClusterRestored) -> StaleGeneration:
    """Return what a restored control plane means to a rank: its generation has ended, and its agent ends the rank."""
    return StaleGeneration(
        error.message, hint="worlds begin anew; the agent joins again and starts its ranks"
    )
