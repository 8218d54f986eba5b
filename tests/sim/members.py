"""Members as programs of their own: lone trainers, and supervisors with several ranks.

Both run the shipped sessions over links in memory; a supervisor runs the shipped relay, and its
ranks shipped rank sessions. What is played here is only what a person or a host would do: start
the program, kill it, start it again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, cast

from strata.agent.environment import Place
from strata.agent.health import Health
from strata.agent.rank_process import RankProcess
from strata.agent.relay import Relay
from strata.client.endpoints import Endpoint, parse_endpoints
from strata.client.member import MemberSession
from strata.client.rank_session import RankSession
from strata.client.seat import RankPlace, Seat, placed
from strata.config import HealthConfig
from strata.errors import (
    BarrierBroken,
    ClusterReplaced,
    Conflict,
    StaleGeneration,
    StaleIncarnation,
    StrataError,
    Unavailable,
)
from strata.session.served import serve
from strata.testing.links import MemoryLink, Switchboard
from strata.testing.processes import Process
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import RankHello, Welcome, WorldUpdate
from strata.v1.worlds_pb2 import STOP_ACTION_DRAIN, STOP_ACTION_PAUSE, STOP_ACTION_RESHAPE, JobSpec
from tests.sim.history import History
from tests.sim.workload import Ears, Trainer

JOB = "job"
REPLICAS = ("r1", "r2", "r3")
GRACE_S = 1.0
SPEC = JobSpec(min_workers=4, max_workers=12, settle_s=1.0, max_fruitless_generations=100_000)

Dial = Callable[[Endpoint], AbstractAsyncContextManager[MemoryLink]]


class Member:
    """One run of one worker: a process with one boot. `leaving` once it was told to leave."""

    def __init__(
        self,
        worker: str,
        run: int,
        slots: int,
        board: Switchboard,
        history: History,
        seed: str,
        unexpected: Callable[[str, BaseException], None],
    ) -> None:
        self.worker = worker
        self.boot = f"boot-{worker}-{run}"
        self.slots = slots
        self.process = Process(worker)
        self.leaving = False
        self.killed = False
        self.generation = 0
        """Of the newest world in which this member trains; 0 while it waits."""
        self._board = board
        self._history = history
        self._rng = random.Random(f"{seed}/{self.boot}")
        self._unexpected = unexpected
        self._address = f"{worker}#{run}"
        self.session: MemberSession | None = None
        self.troubled_s = float("-inf")
        """When something last kept this process from its replicas, but for faults of theirs."""
        self._leave = asyncio.Event()
        self._told = asyncio.Event()
        """Set when the session has news of the world."""
        self.stopped = 0
        """The generation whose ranks here have stopped because a notice asked them to."""
        self._stopping = asyncio.Event()
        self.end_ranks: Callable[[], Awaitable[None]] | None = None
        """Ends the rank processes of a supervisor."""

    @property
    def host(self) -> str:
        """What links of this process are known by."""
        return self._address

    def kill(self) -> None:
        """End it as SIGKILL would."""
        self.killed = True
        self._board.hang_up(self._address)
        self._board.hang_up(f"{self._address}/relay")
        self.process.thaw()
        if self.process.task is not None:
            self.process.task.cancel()

    async def run(self) -> None:
        """Be a member until it is killed, leaves, or its session ends for good."""
        try:
            async with asyncio.TaskGroup() as tasks:
                main = self._alone if self.slots == 1 else self._supervise
                tasks.create_task(self._leave_when_asked())
                tasks.create_task(self._heed())
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
        """Have it leave for good, as a program of its own does on SIGTERM."""
        self.leaving = True
        self._leave.set()

    async def _leave_when_asked(self) -> None:
        await self._leave.wait()
        if self.session is not None:
            await self.session.leave("asked to")

    # -- what it is asked for

    def hear(self, _update: WorldUpdate) -> None:
        """Take note that there is news of the world."""
        self._told.set()

    async def _heed(self) -> None:
        """Do what a notice asks: end the ranks with code 75; then leave, or wait for another world.

        The time until they end stands for their agreement on a step, and for saving it.
        """
        while True:
            await self._told.wait()
            self._told.clear()
            if (update := self._asked()) is not None and update.notice.grace_ms:
                await asyncio.sleep(self._rng.uniform(0, 2))
            update = self._asked()
            if update is None:
                continue
            if update.HasField("place") and self.stopped < update.world.generation:
                await self._stop(update)
            if update.notice.action != STOP_ACTION_PAUSE and not self.leaving:
                self._history.judge.trace.count("members that left as asked")
                self.ask_to_leave()

    def _asked(self) -> WorldUpdate | None:
        """Return the newest update, if its notice asks something of this member."""
        update = self.session.world if self.session is not None else None
        if update is None or not update.HasField("notice"):
            return None
        notice = update.notice
        if notice.action == STOP_ACTION_RESHAPE:
            return None  # which is the ranks' affair
        mine = notice.action != STOP_ACTION_DRAIN or self.worker in notice.worker_ids
        return update if mine else None

    async def _stop(self, update: WorldUpdate) -> None:
        """End the ranks of a generation, and report them as stopped."""
        assert self.session is not None
        generation, place = update.world.generation, update.place
        self.stopped = generation
        self._stopping.set()
        if self.end_ranks is not None:
            await self.end_ranks()
        for rank in range(place.first_rank, place.first_rank + place.slots):
            with suppress(StrataError):  # the generation has ended meanwhile, or the session has
                await self.session.rank_exit(generation=generation, rank=rank, code=75)

    def _open(self, observer: Any) -> MemberSession:
        registration = Registration(
            job=JOB,
            worker_id=self.worker,
            boot=self.boot,
            host=self.worker,
            slots=self.slots,
            spec=SPEC,
            reexecutes=self._begins_anew,
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

    # -- one rank, and nobody above it

    async def _alone(self, tasks: asyncio.TaskGroup) -> None:
        ears = Ears()
        ears.world_callbacks.append(self.hear)
        session = self._open(ears)
        running = tasks.create_task(session.run())
        place = await _ended_by(running, placed(session, ears, job=JOB, worker_id=self.worker, after=0))
        if place is None:
            return
        seat = Seat(session=session, watcher=ears, place=place, owns_member=True)
        trainer = Trainer(seat, ears, self._history, self._rng)
        while True:
            self.generation = seat.place.generation
            if await _ended_by(running, self._train_until_stopped(trainer)) is None:
                return
            self.generation = 0
            if self._begins_anew and trainer.bound and self.stopped < seat.place.generation:
                await _ended_by(running, self._begin_anew(trainer))
                return
            if await _ended_by(running, self._rejoin(trainer)) is None:
                return

    async def _train_until_stopped(self, trainer: Trainer) -> bool:
        """Train until the generation ends, or a notice has this rank stop."""
        if self.stopped < trainer.seat.place.generation:
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
            if not trainer.seat.session._ended.is_set():
                raise
        return True

    @property
    def _begins_anew(self) -> bool:
        """Whether it is a lone trainer that cannot leave what it holds: its host starts its program again."""
        return self._history.judge.saves_first and self.slots == 1

    async def _begin_anew(self, trainer: Trainer) -> None:
        """Leave, once another generation has begun."""
        session, ears = trainer.seat.session, trainer.seat.watcher
        while session.world is None or session.world.world.generation <= trainer.client.generation:
            ears.changed.clear()
            await ears.changed.wait()
        self._history.judge.trace.count("members that began anew")
        self.leaving = True
        await session.leave("begins anew")

    async def _rejoin(self, trainer: Trainer) -> bool:
        await trainer.client._rejoin(10_000.0)
        return True

    # -- several ranks

    async def _supervise(self, tasks: asyncio.TaskGroup) -> None:
        supervisor = _Supervisor(self, tasks)
        self.end_ranks = supervisor.end
        session = self._open(supervisor)
        supervisor.relay = Relay(
            session,
            _NoProcesses(),
            worker_id=self.worker,
            detect_s=5.0,
            grace_s=GRACE_S,
            listener=Health(HealthConfig(), session, _NoProcesses(), detect_s=5.0).stalls,
            processes=_NoProcesses(),
        )
        supervisor.session = session
        self._board.listen(f"{self._address}/relay", supervisor.serve, tasks.create_task)
        running = tasks.create_task(session.run())
        await _ended_by(running, supervisor.run())


class _NoProcesses:
    """Simulated ranks have no process to be asked or killed."""

    def rank_attached(self, rank: int, generation: int) -> None: ...

    def rank_heeds_notices(self, rank: int, generation: int) -> None: ...

    def rank_stepped(self, rank: int, generation: int) -> None: ...

    def rank_stopped(self, rank: int, generation: int) -> None: ...

    def may_ask_to_stop(self) -> bool:
        return True

    def watch(self, rank: int, generation: int, process: RankProcess) -> None: ...

    def forget(self) -> None: ...

    def evict(self, rank: int, generation: int, reason: str) -> None: ...

    async def stack(self, rank: int) -> str | None:
        return None

    def process(self, rank: int) -> str:
        return ""


class _Over(Exception):
    """The program ends."""


async def _ended_by(running: asyncio.Task[None], work: Any) -> Any:
    """Return what `work` returns; None once the session is over, whose error is its own."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([running, task], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return None
        return task.result()
    finally:
        task.cancel()


class _Supervisor:
    """The observer of a supervisor's session: starts the ranks of each generation it has a place in."""

    def __init__(self, member: Member, tasks: asyncio.TaskGroup) -> None:
        self.member = member
        self.session: MemberSession
        self.relay: Relay
        self._tasks = tasks
        self._update: WorldUpdate | None = None
        self._news = asyncio.Event()
        self._ranks: list[asyncio.Task[None]] = []

    async def serve(self, link: MemoryLink) -> None:
        await serve(link, self.relay.accept)

    # -- what the session says

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

    # -- the ranks

    async def run(self) -> None:
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
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.cancel()
        if ranks:
            await asyncio.wait(ranks)
        self.relay.set_place(None)

    def _begin(self, update: WorldUpdate) -> None:
        self.member.generation = update.world.generation
        place = Place(
            job=JOB,
            worker_id=self.member.worker,
            world=update.world,
            member=update.place,
            master_addr="",
            master_port=0,
            socket="/relay",
            endpoints="",
            detect_s=5.0,
        )
        self.relay.set_place(place)
        self._ranks = [self._tasks.create_task(self._rank(place, rank)) for rank in place.ranks]

    async def _rank(self, place: Place, rank: int) -> None:
        """Be one rank's program, which ends with its generation."""
        ears, address = Ears(), self.member.host
        hello = RankHello(
            job=JOB, worker_id=place.worker_id, generation=place.generation, rank=rank, local_rank=0
        )
        board = self.member._board
        session = RankSession(
            Endpoint(path="/relay"),
            hello,
            ears,
            rng=random.Random(rank),
            dial=cast("Any", lambda _endpoint: board.dial(f"{address}/{rank}", f"{address}/relay")),
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_quietly(session.run()))
            point = place.world.restore if place.world.HasField("restore") else None
            seat = Seat(
                session=session,
                watcher=ears,
                place=RankPlace(
                    job=JOB,
                    worker_id=place.worker_id,
                    generation=place.generation,
                    rank=rank,
                    world_size=place.world.size,
                    restore_point=point,
                ),
                owns_member=False,
            )
            rng = random.Random(f"{self.member._rng.random()}/{rank}")
            trainer = Trainer(seat, ears, self.member._history, rng)
            if await _ended_by(running, _connected(session)):
                await _ended_by(running, self.member._train(trainer))
            running.cancel()


async def _quietly(session: Awaitable[None]) -> None:
    """A rank whose generation has ended is let in no more: that ends its program, and nothing else."""
    with suppress(StaleGeneration, Unavailable):
        await session


async def _connected(session: RankSession) -> bool:
    await session.wait_connected()
    return True
