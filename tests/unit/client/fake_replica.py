"""A scripted coordinator over links in memory: a test decides what it sends, and it records what it receives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from strata.client.member_session import MemberSession
from strata.errors import StrataError
from strata.session.endpoints import parse_endpoints
from strata.session.terms import Pace
from strata.testing.links import MemoryLink, Switchboard
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED, Arrival, BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.common_pb2 import Token
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import Done, Down, Hello, Outcomes, Reply, Tick, Up, Welcome, WorldUpdate
from strata.v1.worlds_pb2 import World, WorldMember

UID = "uid-1"


class FakeReplica:
    """A replica that welcomes every session and sends ticks; it sends nothing else unless a test makes it."""

    def __init__(self, board: Switchboard, address: str, *, uid: str = UID, incarnation: int = 7) -> None:
        self.board = board
        self.address = address
        self.uid = uid
        self.revision = 100
        self.incarnation = incarnation
        self.welcoming = True
        self.ticking = True
        self.ready = True
        self.ready_addresses: list[str] = []
        self.refuse_hello: StrataError | None = None
        self.answer: Callable[[Up], Down | None] = lambda _up: None
        self.hellos: list[Hello] = []
        self.hello_times: list[float] = []
        self.received: list[Up] = []
        self.links: list[MemoryLink] = []
        self._welcomed: list[MemoryLink] = []
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.up()

    def up(self) -> None:
        """Accept connections."""
        self.board.listen(self.address, self._serve, self._spawn)

    def down(self) -> None:
        """Die: break every connection and refuse new ones."""
        self.board.hang_up(self.address)

    def send(self, down: Down) -> None:
        """Send a message to the client that connected last."""
        self.links[-1].send(down)

    def world(self, generation: int, *, rank: int | None = 0, size: int = 2, **more: Any) -> None:
        """Send a world; with `rank` None the member has no place in it."""
        update = WorldUpdate(
            world=World(generation=generation, size=size, members=size),
            token=Token(uid=self.uid, revision=self.revision),
            **more,
        )
        if rank is not None:
            place = WorldMember(worker_id="w", incarnation=self.incarnation, slots=1, first_rank=rank)
            update.place.CopyFrom(place)
        self.send(Down(world=update))

    def welcome(self, link: MemoryLink) -> None:
        """Send the welcome for the session on `link`."""
        token = Token(uid=self.uid, revision=self.revision)
        welcome = Welcome(token=token, incarnation=self.incarnation, replica=self.address, detect_s=5)
        link.send(Down(welcome=welcome))
        self._welcomed.append(link)

    def release(self, arrival: Arrival, **payloads: bytes) -> None:
        """Release the round of an arrival to all its ranks."""
        self.send(
            Down(
                outcomes=Outcomes(
                    outcomes=[
                        BarrierOutcome(
                            job=arrival.job,
                            name=arrival.name,
                            generation=arrival.generation,
                            round=arrival.round,
                            result=BARRIER_RESULT_RELEASED,
                            payloads={int(k.removeprefix("r")): v for k, v in payloads.items()},
                        )
                    ]
                )
            )
        )

    async def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Return once `condition` holds; it is evaluated after every received message."""
        async with asyncio.timeout(limit_s):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def next(self, kind: str, *, after: int = 0) -> Any:
        """Return message number `after` (counted from 0) of this kind, once it is received."""
        await self.until(lambda: len(self.all(kind)) > after)
        return self.all(kind)[after]

    def all(self, kind: str) -> list[Any]:
        """Return every received message of one kind."""
        return [getattr(up, kind) for up in self.received if up.WhichOneof("message") == kind]

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, link: MemoryLink) -> None:
        self.links.append(link)
        ticker = self._spawn(self._tick(link))
        try:
            while (up := await link.recv()) is not None:
                self._take(up, link)
                self._news.set()
        finally:
            ticker.cancel()

    def _take(self, up: Up, link: MemoryLink) -> None:
        if up.WhichOneof("message") == "hello":
            self.hellos.append(up.hello)
            self.hello_times.append(asyncio.get_running_loop().time())
            if self.refuse_hello is not None:
                link.close(self.refuse_hello)
            elif self.welcoming:
                self.welcome(link)
            return
        self.received.append(up)
        answer = self.answer(up)
        if answer is not None:
            link.send(answer)

    async def _tick(self, link: MemoryLink) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.ticking and link in self._welcomed:
                link.send(Down(tick=Tick(ready=self.ready, ready_addresses=self.ready_addresses)))


class Recorder:
    """An observer that records each callback."""

    def __init__(self) -> None:
        self.welcomed = asyncio.Event()
        self.connected: list[Welcome] = []
        self.disconnections: list[StrataError] = []
        self.outcomes: list[BarrierOutcome] = []
        self.checkpoints: list[Checkpoint] = []

    def on_connected(self, welcome: Welcome) -> None:
        self.connected.append(welcome)
        self.welcomed.set()

    def on_disconnected(self, reason: StrataError) -> None:
        self.disconnections.append(reason)

    def on_world(self, update: WorldUpdate) -> None:
        pass  # the session stores it

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        self.outcomes.append(outcome)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.append(checkpoint)


def done(up: Up) -> Down | None:
    """Answer each call and rank exit with a bare reply."""
    kind = up.WhichOneof("message")
    if kind in {"call", "rank_exit"}:
        return Down(reply=Reply(id=getattr(up, kind).id, done=Done()))
    return None


class Rig:
    """One session, the replicas "a:1", "b:1"… and the callbacks that the session's observer recorded."""

    def __init__(self, replicas: list[FakeReplica], session: MemberSession, observer: Recorder) -> None:
        self.replicas = replicas
        self.session = session
        self.observer = observer
        self.running = asyncio.get_running_loop().create_task(session.run())

    @property
    def serving(self) -> FakeReplica:
        """Return the replica that serves the session, or served it last."""
        assert self.session.welcome is not None
        return next(r for r in self.replicas if r.address == self.session.welcome.replica)

    @property
    def others(self) -> list[FakeReplica]:
        return [r for r in self.replicas if r is not self.serving]

    async def reconnected(self, times: int) -> FakeReplica:
        """Return the serving replica once the session was welcomed `times` times."""
        async with asyncio.timeout(60):
            while len(self.observer.connected) < times:
                self.observer.welcomed.clear()
                await self.observer.welcomed.wait()
        return self.serving


@asynccontextmanager
async def rig(count: int = 1, *, seed: int = 1, pace: Pace | None = None) -> AsyncIterator[Rig]:
    """Yield a session of member "w", connected to one of `count` replicas."""
    board = Switchboard(delay_s=0.0005)
    addresses = [f"{letter}:1" for letter in "abcde"[:count]]
    replicas = [FakeReplica(board, address) for address in addresses]
    observer = Recorder()
    session = MemberSession(
        parse_endpoints(addresses),
        Registration(job="j", worker_id="w", boot="boot-1", slots=2),
        observer,
        rng=random.Random(seed),
        dial=lambda endpoint: board.dial("client", str(endpoint)),
        pace=pace,
    )
    made = Rig(replicas, session, observer)
    await session.wait_connected()
    try:
        yield made
    finally:
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)


def arrival(name: str = "b", *, rank: int = 0, generation: int = 1, round_: int = 1, **more: Any) -> Arrival:
    """Return one rank's arrival at a barrier."""
    return Arrival(job="j", name=name, generation=generation, round=round_, ranks=[rank], **more)
