"""Members as programs: standalone trainers, and agents with several ranks (`tests.sim.programs.agents`).

Both run the shipped sessions over links in memory. The simulation does only what a person or a host would do: start a
program, kill it, start it again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, cast

from strata.agent.notices import notice_for_member
from strata.client.member_session import MemberSession
from strata.client.rank.shared_session import SharedSession, placed
from strata.errors import (
    BarrierBroken,
    ClusterReplaced,
    Conflict,
    StaleGeneration,
    StaleIncarnation,
    StrataError,
)
from strata.session.endpoints import Endpoint, parse_endpoints
from strata.testing.links import MemoryLink, Switchboard
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JobSpec
from tests.sim.judges.history import History
from tests.sim.programs.agents import SimulatedAgent, ended_by
from tests.sim.programs.ranks import Program
from tests.sim.programs.workload import Ears, Trainer

JOB = "job"
REPLICAS = ("r1", "r2", "r3")
SPEC = JobSpec(min_workers=4, max_workers=12, settle_s=1.0, max_no_progress_generations=100_000)

Dial = Callable[[Endpoint], AbstractAsyncContextManager[MemoryLink]]


class Member:
    """One run of one worker: a process with one boot. `leaving` is set once it was requested to leave."""

    def __init__(
        self,
        worker: str,
        run: int,
        slots: int,
        board: Switchboard,
        history: History,
        seed: str,
        tasks: asyncio.TaskGroup,
        unexpected: Callable[[str, BaseException], None],
    ) -> None:
        self.worker = worker
        self.boot = f"boot-{worker}-{run}"
        self.slots = slots
        self.job = JOB
        self.number = run
        self.process = Program(worker)
        self.agent: SimulatedAgent | None = None
        """None in a standalone trainer."""
        self.leaving = False
        self.killed = False
        self.generation = 0
        """Generation of the newest world in which this member trains; 0 while it waits."""
        self._board = board
        self._history = history
        self._tasks = tasks
        self._rng = random.Random(f"{seed}/{self.boot}")
        self._unexpected = unexpected
        self._address = f"{worker}#{run}"
        self.session: MemberSession | None = None
        self.disturbed_s = float("-inf")
        """When a fault outside the replicas last kept this process from reaching them."""
        self._leave = asyncio.Event()
        self._world_changed = asyncio.Event()
        """Set when the session gets a new world."""
        self.stopped = 0
        """The generation in which this member's ranks have stopped because of a notice."""
        self._stopping = asyncio.Event()
        self.end_ranks: Callable[[], Awaitable[None]] | None = None
        """Ends the rank processes of an agent."""

    @property
    def host(self) -> str:
        """Host name of this process's links."""
        return self._address

    def kill(self) -> None:
        """End the process as SIGKILL would. An agent's rank processes live on, with no listener at their socket."""
        self.killed = True
        self._board.hang_up(self._address)
        self._board.hang_up(f"{self._address}/relay")
        self.process.killed()

    async def run(self) -> None:
        """Be a member until it is killed, leaves, or its session ends for good."""
        try:
            async with asyncio.TaskGroup() as tasks:
                main = self._alone if self.slots == 1 else self._supervise
                tasks.create_task(self._leave_when_requested())
                tasks.create_task(self._follow_notices())
                await main(tasks)
                raise _Over
        except* _Over:
            pass
        except* (StaleIncarnation, Conflict) as errors:
            self._history.judge.trace.note(self._address, f"over: {errors.exceptions[0]!r}")
            self._history.judge.trace.count(f"members ended: {type(errors.exceptions[0]).__name__}")
        except* ClusterReplaced as errors:
            self._unexpected(self._address, errors)
        except* Exception as errors:  # noqa: BLE001  # the simulation reports whatever it is
            self._unexpected(self._address, errors)

    def ask_to_leave(self) -> None:
        """Make the member leave for good, as a standalone program does on SIGTERM."""
        self.leaving = True
        self._leave.set()

    async def _leave_when_requested(self) -> None:
        await self._leave.wait()
        if self.session is not None:
            await self.session.leave("asked to")

    # -- stop requests

    def hear(self, _update: WorldUpdate) -> None:
        """Note that the world has changed."""
        self._world_changed.set()

    async def _follow_notices(self) -> None:
        """Leave as a notice requests: end the ranks with code 75 once they have stopped, or their grace is over."""
        while True:
            await self._world_changed.wait()
            self._world_changed.clear()
            if (update := self._leave_notice()) is not None and update.HasField("place"):
                await self._ranks_stop(update)
            update = self._leave_notice()
            if update is None:
                continue
            if update.HasField("place") and self.stopped < update.world.generation:
                await self._stop(update)
            if not self.leaving:
                self._history.judge.trace.count("members that left as asked")
                self.ask_to_leave()

    async def _ranks_stop(self, update: WorldUpdate) -> None:
        """Return once all ranks here have stopped at the common step, or their grace is over."""
        judge, generation, place = self._history.judge, update.world.generation, update.place
        mine = {(generation, rank) for rank in range(place.first_rank, place.first_rank + place.slots)}
        until_s = judge.trace.now_s + update.notice.grace_ms / 1000
        while not mine <= judge.stops.stopped and judge.trace.now_s < until_s:
            newest = self._leave_notice()
            if newest is None or newest.world.generation != generation:
                return
            await asyncio.sleep(self._rng.uniform(0, 0.3))

    def _leave_notice(self) -> WorldUpdate | None:
        """Return the newest update, if its notice requests that this member leave."""
        update = self.session.world if self.session is not None else None
        return update if notice_for_member(update, self.worker) is not None else None

    async def _stop(self, update: WorldUpdate) -> None:
        """End the ranks of a generation, and report them as stopped."""
        assert self.session is not None
        generation, place = update.world.generation, update.place
        self.stopped = generation
        self._stopping.set()
        if self.end_ranks is not None:
            await self.end_ranks()
        for rank in range(place.first_rank, place.first_rank + place.slots):
            with suppress(StrataError):  # the generation or the session has ended meanwhile
                await self.session.rank_exit(generation=generation, rank=rank, code=75)

    def _open(self, observer: Any) -> MemberSession:
        registration = Registration(
            job=JOB,
            worker_id=self.worker,
            boot=self.boot,
            host=self.worker,
            slots=self.slots,
            spec=SPEC,
            cannot_restart=self._cannot_restart,
        )
        self.session = MemberSession(
            parse_endpoints(",".join(REPLICAS)),
            registration,
            observer,
            rng=random.Random(self._rng.random()),
            dial=cast("Any", self._dial),
        )
        return self.session

    def _dial(self, endpoint: Endpoint) -> AbstractAsyncContextManager[MemoryLink]:
        return self._board.dial(self._address, endpoint.host)

    # -- a standalone process with one rank

    async def _alone(self, tasks: asyncio.TaskGroup) -> None:
        ears = Ears()
        ears.world_callbacks.append(self.hear)
        session = self._open(ears)
        running = tasks.create_task(session.run())
        place = await ended_by(running, placed(session, ears, job=JOB, worker_id=self.worker, after=0))
        if place is None:
            return
        shared_session = SharedSession(session=session, watcher=ears, place=place, owns_member=True)
        trainer = Trainer(shared_session, ears, self._history, self._rng)
        while True:
            self.generation = shared_session.place.generation
            if await ended_by(running, self._train_until_stopped(trainer)) is None:
                return
            self.generation = 0
            if self._cannot_restart and trainer.bound and self.stopped < shared_session.place.generation:
                await ended_by(running, self._end(trainer))
                return
            if await ended_by(running, self._rejoin(trainer)) is None:
                return

    async def _train_until_stopped(self, trainer: Trainer) -> bool:
        """Train until the generation ends, or a notice stops this rank."""
        if self.stopped < trainer.shared_session.place.generation:
            self._stopping.clear()
        stopping = asyncio.create_task(self._stopping.wait())
        training = asyncio.create_task(self._train(trainer))
        try:
            await asyncio.wait((stopping, training), return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                training.result()
        finally:
            stopping.cancel()
            training.cancel()
            await asyncio.wait((stopping, training))
        return True

    async def _train(self, trainer: Trainer) -> bool:
        """Train until the generation ends."""
        try:
            await trainer.run()
        except (StaleGeneration, BarrierBroken):
            pass
        except StrataError:
            if not trainer.shared_session.session._ended.is_set():
                raise
        return True

    @property
    def _cannot_restart(self) -> bool:
        """Whether this is a standalone process that ends with its generation; its host may start the program again."""
        return self._history.judge.saves_first and self.slots == 1

    async def _end(self, trainer: Trainer) -> None:
        """Leave once another generation has begun."""
        session, ears = trainer.shared_session.session, trainer.shared_session.watcher
        while session.world is None or session.world.world.generation <= trainer.client.generation:
            ears.changed.clear()
            await ears.changed.wait()
        self._history.judge.trace.count("members that ended with their generation")
        self.leaving = True
        await session.leave("ends with its generation")

    async def _rejoin(self, trainer: Trainer) -> bool:
        await trainer.client._rejoin(10_000.0)
        return True

    # -- an agent with several ranks

    async def _supervise(self, tasks: asyncio.TaskGroup) -> None:
        self.agent = SimulatedAgent(self, self._tasks)
        self.end_ranks = self.agent.end
        await self.agent.main(tasks)


class _Over(Exception):
    """Raised to end the program."""
