"""An agent as a program: the shipped relay and upward session, and rank processes that it starts.

The simulation replaces the kernel: it knows the process behind a connection and the state of each process
(`tests.sim.programs.ranks`). A rank that finds no listener at its agent's socket ends, as in
`strata.client.rank_session.dial_agent`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from strata.agent.environment import Place
from strata.agent.exit_reports import ExitReports
from strata.agent.health.rank_watch import Health
from strata.agent.relay import Relay
from strata.client.rank.shared_session import RankPlace, SharedSession
from strata.client.rank_session import RankSession
from strata.config import HealthConfig
from strata.errors import Conflict, Refused, StaleGeneration, StaleIncarnation, StrataError, Unavailable
from strata.session.endpoints import Endpoint
from strata.session.served import End, Handler, Session, serve
from strata.testing.links import MemoryLink
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.session_pb2 import Hello, RankHello, Welcome, WorldUpdate
from tests.sim.programs.ranks import DETECT_S, GRACE_S, SAMPLING, RankProcess, Watch
from tests.sim.programs.workload import Ears, Trainer

if TYPE_CHECKING:
    from tests.sim.programs.members import Member

RIVAL_S = 0.005
"""Delay after which a refused rival (see `start_rival`) tries again."""


async def ended_by(running: asyncio.Task[None], work: Any) -> Any:
    """Return the result of `work`; None if the session ends first. The session raises its error itself."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([running, task], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return None
        return task.result()
    finally:
        task.cancel()


class _Ranks:
    """Callbacks of the relay and the stall watch that a simulated agent does not need."""

    def rank_attached(self, rank: int, generation: int) -> None: ...

    def rank_supports_graceful_stop(self, rank: int, generation: int) -> None: ...

    def rank_stepped(self, rank: int, generation: int) -> None: ...

    def rank_cannot_go_on(self, rank: int, generation: int, reason: str) -> None: ...

    def rank_stopped(self, rank: int, generation: int) -> None: ...

    def may_request_stop(self) -> bool:
        return True

    async def stack(self, rank: int) -> str | None:
        return None

    def process(self, rank: int) -> str:
        return ""


class _Attached:
    """The relay's handler of one session; it also notes the end of the session for the simulation."""

    def __init__(self, handler: Handler, process: RankProcess) -> None:
        self._handler = handler
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def ended(self, end: End) -> None:
        self._process.ended()
        self._handler.ended(end)


class SimulatedAgent(_Ranks):
    """The owner of ranks and observer of the session: starts the ranks of each generation in which it has a place."""

    def __init__(self, member: Member, tasks: asyncio.TaskGroup) -> None:
        """`tasks` outlives the agent: it runs the ranks' processes."""
        self.member = member
        self._tasks = tasks
        self._judge = member._history.judge
        self._board = member._board
        self.socket = f"{member.host}/relay"
        self._update: WorldUpdate | None = None
        self._news = asyncio.Event()
        self._pids = itertools.count(1000 * member.number)
        self.processes: dict[int, RankProcess] = {}
        """The processes of this agent, by rank."""
        self.place: Place | None = None
        self.session = member._open(self)
        self.reports = ExitReports(self.session)
        self.watch = Watch(self.evict)
        self.relay = Relay(
            self.session,
            self,
            worker_id=member.worker,
            detect_s=DETECT_S,
            grace_s=GRACE_S,
            listener=Health(HealthConfig(), self.session, self, detect_s=DETECT_S).stalls,
            processes=cast("Any", self.watch),
        )

    async def main(self, tasks: asyncio.TaskGroup) -> None:
        """Be an agent until the session is over. Its ranks end with it, unless it is killed."""
        self._board.listen(self.socket, self._serve, tasks.create_task)
        running = tasks.create_task(self.session.run())
        watching = tasks.create_task(self.watch.run())
        try:
            await ended_by(running, self._follow())
        finally:
            watching.cancel()
            if not self.member.killed:
                self._board.hang_up(self.socket)
                self._end_processes()

    # -- attaching ranks

    async def _serve(self, link: MemoryLink) -> None:
        process = link.other.process
        assert isinstance(process, RankProcess)
        await serve(link, partial(self._accept, process))

    async def _accept(self, process: RankProcess, hello: Hello, session: Session) -> Handler:
        again = process.detached_s is not None
        handler = await self.relay.accept(hello, session, cast("Any", process))
        if (why := self._judge.ranks.attached(process)) is not None:
            self._judge.wrong(why)
        process.opened()
        self._judge.trace.count("ranks that attached again" if again else "ranks that attached")
        return cast("Handler", _Attached(handler, process))

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """Kill a rank of this generation, with a reason that its exit report carries."""
        process = self.processes.get(rank)
        if process is None or process.generation != generation or not process.alive:
            return
        if (why := self._judge.ranks.evicted(process, reason)) is not None:
            self._judge.wrong(why)
        kind = "frozen" if reason == SAMPLING.frozen else "disconnected"
        self._judge.trace.count(f"ranks evicted: {kind}")
        process.doomed = reason
        process.kill()

    # -- callbacks of the session

    def on_connected(self, welcome: Welcome) -> None:
        pass

    def on_disconnected(self, reason: StrataError) -> None:
        pass

    def on_world(self, update: WorldUpdate) -> None:
        self.relay.on_world(update)
        self.member.hear(update)
        if self._update is None or update.token.revision >= self._update.token.revision:
            self._update = update
            self._news.set()

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        self.relay.on_outcome(outcome)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.relay.on_checkpoint(checkpoint)

    # -- its processes

    async def _follow(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            update = self._update
            if update is None or update.world.generation <= self.member.generation:
                continue
            await self.end()
            if update.HasField("place") and self.member.stopped < update.world.generation:
                self._begin(update)

    async def end(self) -> None:
        """End the ranks that run here."""
        self.place = None
        tasks = [process.task for process in self._end_processes() if process.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        self.relay.set_place(None)

    def _end_processes(self) -> list[RankProcess]:
        processes, self.processes = list(self.processes.values()), {}
        for process in processes:
            process.kill()
        return processes

    def _begin(self, update: WorldUpdate) -> None:
        self.member.generation = update.world.generation
        self.place = place = Place(
            job=self.member.job,
            worker_id=self.member.worker,
            world=update.world,
            member=update.place,
            master_addr="",
            master_port=0,
            socket="/relay",
            endpoints="",
            detect_s=DETECT_S,
        )
        self.relay.set_place(place)
        for rank in place.ranks:
            process = self.processes[rank] = self._new_process(place.generation, rank)
            process.start(self._run(process, self._rank(place, process)), tasks=self._tasks)
            assert process.task is not None
            process.task.add_done_callback(partial(self._exited, process))

    def _new_process(self, generation: int, rank: int) -> RankProcess:
        process = RankProcess(
            next(self._pids),
            generation,
            rank,
            agent=self.member.process,
            board=self._board,
            host=self.member.host,
        )
        self._judge.ranks.processes.append(process)
        return process

    def _exited(self, process: RankProcess, _task: asyncio.Task[None]) -> None:
        """Report the end of a process, unless the agent itself ended it."""
        if self.member.process.alive and self.processes.get(process.rank) is process:
            self._judge.trace.count("ranks that ended by themselves")
            code = 1 if process.killed_s is None else -9
            self.reports.report(process.generation, process.rank, code, process.doomed or f"exit {code}")

    async def _run(self, process: RankProcess, program: Any) -> None:
        """Run a rank's program until the end of its generation or of its agent."""
        trace = self._judge.trace
        try:
            await program
        except* (StaleGeneration, StaleIncarnation, Refused, Conflict) as errors:
            trace.note(process.name, f"over: {errors.exceptions[0]!r}")
            trace.count(f"ranks ended: {type(errors.exceptions[0]).__name__}")
        except* Exception as errors:  # noqa: BLE001  # the simulation reports whatever it is
            self.member._unexpected(process.name, errors)

    def _session(self, process: RankProcess, observer: Ears) -> RankSession:
        hello = RankHello(
            job=self.member.job,
            worker_id=self.member.worker,
            generation=process.generation,
            rank=process.rank,
            local_rank=0,
        )
        dial = cast("Any", lambda _endpoint: self._dial(process))
        return RankSession(
            Endpoint(path="/relay"), hello, observer, rng=random.Random(process.rank), dial=dial
        )

    @asynccontextmanager
    async def _dial(self, process: RankProcess) -> AsyncIterator[MemoryLink]:
        """Connect as `strata.client.rank_session.dial_agent` does."""
        if not self._board.answers(process.address, self.socket):
            raise StaleIncarnation("the agent has ended, and this rank with it")
        if process.cut_off:
            raise Unavailable("the socket takes no connection")
        async with self._board.dial(process.address, self.socket) as link:
            yield link

    async def _rank(self, place: Place, process: RankProcess) -> None:
        """Run one rank's program.

        It may outlive its generation, until the agent ends the program or has itself ended.
        """
        ears, rank = Ears(), process.rank
        session = self._session(process, ears)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(session.run())
            point = place.world.restore if place.world.HasField("restore") else None
            shared_session = SharedSession(
                session=session,
                watcher=ears,
                place=RankPlace(
                    job=place.job,
                    worker_id=place.worker_id,
                    generation=place.generation,
                    rank=rank,
                    world_size=place.world.size,
                    restore_point=point,
                ),
                owns_member=False,
            )
            rng = random.Random(f"{self.member._rng.random()}/{rank}")
            trainer = Trainer(shared_session, ears, self.member._history, rng)
            if await ended_by(running, _connected(session)):
                await ended_by(running, self.member._train(trainer))

    # -- a rival

    def start_rival(self, first: RankProcess, limit_s: float) -> RankProcess:
        """Start another process that attaches as the same rank, until it is admitted or `limit_s` is over."""
        rival = self._new_process(first.generation, first.rank)
        rival.start(self._run(rival, self._rival(rival, limit_s)), tasks=self._tasks)
        return rival

    async def _rival(self, process: RankProcess, limit_s: float) -> None:
        trace = self._judge.trace
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while True:
                    session = self._session(process, Ears())
                    running = asyncio.create_task(session.run())
                    try:
                        await session.wait_connected()
                        trace.count("rivals let in")
                        return
                    except StaleIncarnation:  # the rival ends with the agent, as a rank does
                        raise
                    except Refused:
                        trace.count("rivals refused")
                    finally:
                        running.cancel()
                        await asyncio.wait((running,))
                    await asyncio.sleep(RIVAL_S)


async def _connected(session: RankSession) -> bool:
    await session.wait_connected()
    return True
