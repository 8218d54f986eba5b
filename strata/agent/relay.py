"""The relay: ranks attach to their agent, whose single session with the coordinators carries their messages.

A rank opens the same kind of session to this relay as a member opens to a coordinator. The relay forwards a rank's
messages unchanged (the session with the coordinators merges arrivals of one round into one message). It passes
the coordinators' outcomes, checkpoints and worlds on to every rank of the same generation. So only the agent
handles the loss of a coordinator, and a rank never notices it.

A rank that can continue in a newer generation within its process receives its new place (`move`) and attaches again.
Its local rank stays the same.

The relay evicts a rank if all of this holds: the rank's side ended the connection without a `Leave`, the rank's
process lives, and the rank does not attach again within the grace. A rank whose connection was ended by the
agent's side is not evicted.
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
"""How long an ending process may take to free its memory after its connection has ended."""

log = get_logger()

INSTANCE = "agent"


class Upstream(forwarding.Upstream, Protocol):
    """The part of the session with the coordinators that the relay needs."""

    @property
    def world(self) -> WorldUpdate | None:
        """The newest known world."""
        ...

    @property
    def connected(self) -> bool:
        """Whether a coordinator serves the session at this moment."""
        ...


class Listener(Protocol):
    """Receives the ranks' progress and passes it on."""

    def on_progress(self, generation: int, ranks: Sequence[RankProgress]) -> None:
        """Record the progress of ranks, and report it to the coordinators."""
        ...

    def on_detached(self, generation: int, rank: int) -> None:
        """Record that a rank's session ended in order; its process may live on."""
        ...


class Ranks(Protocol):
    """This node's ranks, as the owner of their processes knows them. A rank is named by its number and generation."""

    def rank_attached(self, rank: int, generation: int) -> None:
        """Record that a rank was admitted; if its process continues, the rank has now arrived in its new generation."""
        ...

    def rank_supports_graceful_stop(self, rank: int, generation: int) -> None:
        """Record that a rank stops by itself at a stop request to its generation."""
        ...

    def rank_stepped(self, rank: int, generation: int) -> None:
        """Record that a rank has made a step."""
        ...

    def rank_cannot_go_on(self, rank: int, generation: int, reason: str) -> None:
        """Record that a rank is about to end for a reason that a restart would not cure."""
        ...

    def rank_stopped(self, rank: int, generation: int) -> None:
        """Record that a rank has stopped as requested, whatever the exit code of its process is."""
        ...

    def may_request_stop(self) -> bool:
        """Tell whether a rank's request for a common stop counts for the job: not while the agent ends its ranks."""
        ...

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """Kill a rank of this generation; its exit report carries the reason."""
        ...


class Processes(Protocol):
    """The watch over the processes of ranks."""

    def watch(self, rank: int, generation: int, process: RankProcess) -> None:
        """Watch `process` as the process of this rank, instead of any earlier one."""
        ...

    def forget(self) -> None:
        """Stop watching all processes."""
        ...


class Relay:
    """Admits the ranks of the current place, and carries messages between them and the coordinators."""

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
        """By local rank: a process has the same local rank in all its generations."""
        self._processes: dict[int, RankProcess] = {}
        """By rank of the current place: the process that attached last."""
        self._graces: dict[int, asyncio.TimerHandle] = {}

    # -- from the agent and the session with the coordinators

    def set_place(self, place: Place | None) -> None:
        """Admit only the ranks of `place` from now on; None admits no rank."""
        self._place = place
        self._processes.clear()
        self._watch.forget()
        for timer in self._graces.values():
            timer.cancel()
        self._graces.clear()

    def process(self, rank: int) -> RankProcess | None:
        """Return the process that attached last as this rank of the current place, or None."""
        return self._processes.get(rank)

    def in_process(self) -> frozenset[int]:
        """Return the local ranks that are attached and can go on in another generation."""
        return frozenset(local for local, handler in self._attached.items() if handler.in_process)

    def move(self, place: Place, local_ranks: Collection[int]) -> None:
        """Send these local ranks of the previous generation their place in the new one."""
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
        self._send_to_generation(outcome.generation, Down(outcomes=Outcomes(outcomes=[outcome])))

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Hand a change of a checkpoint to the ranks of its generation."""
        self._send_to_generation(checkpoint.generation, Down(checkpoint=checkpoint))

    def on_world(self, update: WorldUpdate) -> None:
        """Hand the world to every rank; a newer world ends the generation of the attached ranks."""
        for handler in self._attached.values():
            handler.session.send(Down(world=update))

    def _send_to_generation(self, generation: int, message: Down) -> None:
        for handler in self._attached.values():
            if handler.generation == generation:
                handler.session.send(message)

    # -- from the ranks

    async def accept(self, hello: Hello, session: Session, process: RankProcess | None = None) -> Handler:
        """Attach the rank that sent `hello`, or refuse it (called by `session.served.serve`).

        `process` is the process that dialled; a simulation has none.
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
        """Return the local rank of a rank that may attach; else raise `StaleGeneration` or `Refused`."""
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
        """Record a rank's process; `Refused` while an earlier process of this rank lives."""
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

    def may_request_stop(self, generation: int) -> bool:
        """Tell whether a request for a common stop by a rank of this generation counts for the job."""
        runs = self._place is not None and self._place.generation == generation
        return runs and self.ranks.may_request_stop()

    def _detached(self, handler: _RankHandler, end: End) -> None:
        rank, generation = handler.rank, handler.generation
        if self._attached.get(handler.local_rank) is not handler:
            return
        del self._attached[handler.local_rank]
        current = self._place is not None and self._place.generation == generation
        if end is not End.BROKEN or handler.session.ended_here:
            self._listener.on_detached(generation, rank)
        elif current:
            self._graces[rank] = asyncio.get_running_loop().call_later(
                self._grace_s, self._grace_over, rank, generation, self._grace_s
            )

    def _grace_over(self, rank: int, generation: int, waited_s: float) -> None:
        self._graces.pop(rank, None)
        process = self._processes.get(rank)
        if process is not None and not process.alive:
            return  # the process's parent waits for it, and reports how it ended
        if process is not None and process.exiting and waited_s < EXIT_S:
            # check again once the kernel has freed the process's memory: device memory may take seconds
            self._graces[rank] = asyncio.get_running_loop().call_later(
                self._grace_s, self._grace_over, rank, generation, waited_s + self._grace_s
            )
            return
        if self._place is not None and self._place.ranks.index(rank) not in self._attached:
            reason = f"its connection ended, and it did not attach again within {self._grace_s:g} s"
            self.ranks.evict(rank, generation, reason)


class _RankHandler(Carrier):
    """Handles the messages of one rank (`session.served.Handler`)."""

    upstream: Upstream

    def __init__(self, relay: Relay, hello: RankHello, local_rank: int, session: Session) -> None:
        self._relay = relay
        self.upstream = relay._upstream  # the handler is part of the relay
        self._job = hello.job
        self.rank = hello.rank
        self.local_rank = local_rank
        self.in_process = hello.in_process
        self.generation = hello.generation
        self.session = session

    def check_arrival(self, arrival: Arrival) -> None:
        if list(arrival.ranks) != [self.rank] or arrival.generation != self.generation:
            raise InvalidArgument(f"rank {self.rank} of generation {self.generation} arrives only for itself")

    def progress(self, progress: Progress) -> None:
        mine = [one for one in progress.ranks if one.rank == self.rank]
        if progress.generation == self.generation and mine:
            if any(one.supports_graceful_stop for one in mine):
                self._relay.ranks.rank_supports_graceful_stop(self.rank, self.generation)
            if any(one.step > 0 for one in mine):
                self._relay.ranks.rank_stepped(self.rank, self.generation)
            self._relay._listener.on_progress(self.generation, mine)  # the handler is part of the relay

    async def rank_exit(self, rank_exit: RankExit) -> Reply:
        mine = (rank_exit.rank, rank_exit.generation) == (self.rank, self.generation)
        if not mine or rank_exit.code not in {PREEMPTED, DO_NOT_REQUEUE}:
            raise Refused("a rank's exit is reported by the agent that waits for its process")
        if rank_exit.code == PREEMPTED:
            self._relay.ranks.rank_stopped(self.rank, self.generation)
        else:
            self._relay.ranks.rank_cannot_go_on(self.rank, self.generation, rank_exit.reason)
        return Reply(token=self.upstream.token)

    async def call(self, call: Call) -> Reply:
        if call.HasField("stop_job") and not self._relay.may_request_stop(self.generation):
            raise StaleGeneration(f"this node's ranks of generation {self.generation} are being ended")
        try:
            return await super().call(call)
        except ClusterRestored as error:
            raise _as_stale_generation(error) from error

    def _refuse(self, arrival: Arrival, error: StrataError) -> None:
        super()._refuse(arrival, _as_stale_generation(error) if isinstance(error, ClusterRestored) else error)

    async def leave(self, leave: Leave) -> None:
        log.debug("rank.detached", rank=self.rank, generation=self.generation, reason=leave.reason)

    def tick(self, sequence: int) -> Tick:
        return Tick(sequence=sequence, ready=self.upstream.connected)

    def ended(self, end: End) -> None:
        self._relay._detached(self, end)  # the handler is part of the relay


def _as_stale_generation(error: ClusterRestored) -> StaleGeneration:
    """Return the error a rank gets after a restore of the control plane.

    Its generation has ended, and its agent ends the rank.
    """
    return StaleGeneration(
        error.message, hint="generations start again; the agent joins again and starts its ranks"
    )
