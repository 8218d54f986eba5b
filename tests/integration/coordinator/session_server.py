"""A small coordinator or agent for the client's tests: real transports, real serving code, no etcd.

The server gives every member a separate world and releases every barrier immediately. It records how and when each
session ends, because replicas detect a member's death from the end of its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from strata.core.timing import Timing
from strata.session.framed import FramedLink, challenged, newest_down
from strata.session.link import Link
from strata.session.served import End, Session, serve
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED, Arrival, BarrierOutcome
from strata.v1.common_pb2 import Token
from strata.v1.session_pb2 import (
    Call,
    Done,
    Down,
    Hello,
    Leave,
    Outcomes,
    Progress,
    RankExit,
    Reply,
    Tick,
    Up,
    Welcome,
    WorldUpdate,
)
from strata.v1.session_pb2_grpc import SessionsServicer, add_SessionsServicer_to_server
from strata.v1.worlds_pb2 import JOB_PHASE_RUNNING, World, WorldMember
from strata.wire.streams import Spawn, serve_stream


@dataclass
class Served:
    """One session: its member, and how and when (loop time) it ended."""

    hello: Hello
    ended: asyncio.Future[tuple[End, float]]
    arrivals: list[Arrival] = field(default_factory=list)

    async def end(self, limit_s: float) -> tuple[End, float]:
        """Return how and when the session ended; raise `TimeoutError` if it does not end."""
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(self.ended)


class SessionServer:
    """The sessions that one endpoint served, in order."""

    def __init__(self) -> None:
        self.address = ""
        self.sessions: list[Served] = []
        self._news = asyncio.Event()

    async def session(self, index: int = 0, limit_s: float = 30.0) -> Served:
        """Return the `index`-th session that was opened here."""
        async with asyncio.timeout(limit_s):
            while len(self.sessions) <= index:
                self._news.clear()
                await self._news.wait()
        return self.sessions[index]

    async def accept(self, hello: Hello, session: Session) -> _Handler:
        served = Served(hello, asyncio.get_running_loop().create_future())
        self.sessions.append(served)
        self._news.set()
        incarnation = len(self.sessions)
        token = Token(uid="fake", revision=incarnation)
        session.send(
            Down(welcome=Welcome(token=token, incarnation=incarnation, replica="fake", detect_s=5.0))
        )
        place = WorldMember(worker_id=hello.member.worker_id, incarnation=incarnation, slots=1)
        world = World(generation=1, size=1, members=1)
        session.send(Down(world=WorldUpdate(world=world, place=place, phase=JOB_PHASE_RUNNING, token=token)))
        return _Handler(served, session)


class _Handler:
    def __init__(self, served: Served, session: Session) -> None:
        self._served = served
        self._session = session

    def arrivals(self, arrivals: Sequence[Arrival]) -> None:
        self._served.arrivals.extend(arrivals)
        for arrival in arrivals:
            outcome = BarrierOutcome(
                job=arrival.job,
                name=arrival.name,
                generation=arrival.generation,
                round=arrival.round,
                result=BARRIER_RESULT_RELEASED,
                payloads=dict(zip(arrival.ranks, arrival.payloads, strict=False)),
            )
            self._session.send(Down(outcomes=Outcomes(outcomes=[outcome])))

    def progress(self, progress: Progress) -> None:
        pass

    async def rank_exit(self, rank_exit: RankExit) -> Reply:
        return Reply(done=Done())

    async def call(self, call: Call) -> Reply:
        return Reply(done=Done())

    async def leave(self, leave: Leave) -> None:
        pass

    def tick(self, sequence: int) -> Tick:
        return Tick(sequence=sequence, ready=True)

    def ended(self, end: End) -> None:
        if not self._served.ended.done():
            self._served.ended.set_result((end, asyncio.get_running_loop().time()))


class _Sessions(SessionsServicer):
    def __init__(self, server: SessionServer, spawn: Spawn) -> None:
        self._server = server
        self._spawn = spawn

    async def Session(  # type: ignore[override]  # noqa: N802  # gRPC's name; the handler uses `context` alone
        self, request_iterator: Any, context: Any
    ) -> None:
        async def logic(link: Link[Up, Down]) -> None:
            await serve(link, self._server.accept)

        await serve_stream(context, logic, self._spawn)


@asynccontextmanager
async def serving(address: str = "127.0.0.1:0", *, detect_s: float = 5.0) -> AsyncIterator[SessionServer]:
    """Serve sessions inside the block: at "127.0.0.1:0" or "[::1]:0" as a coordinator, at "unix:/path" as an agent."""
    ours = SessionServer()
    if address.startswith("unix:"):
        ours.address = address
        async with _as_agent(ours, address.removeprefix("unix:")):
            yield ours
        return
    tasks: set[asyncio.Task[None]] = set()

    def spawn(logic: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(logic)
        tasks.add(task)
        return task

    server = grpc.aio.server(options=[*Timing.derive(detect_s).server_options(), ("grpc.so_reuseport", 0)])
    add_SessionsServicer_to_server(_Sessions(ours, spawn), server)
    port = server.add_insecure_port(address)
    ours.address = f"{address.rpartition(':')[0]}:{port}"
    await server.start()
    try:
        yield ours
    finally:
        await server.stop(0.2)
        await asyncio.gather(*tasks)


@asynccontextmanager
async def _as_agent(ours: SessionServer, path: str) -> AsyncIterator[None]:
    links: list[FramedLink[Up, Down]] = []
    async with asyncio.TaskGroup() as tasks:

        async def logic(link: FramedLink[Up, Down]) -> None:
            assert await challenged(link)
            await serve(link, ours.accept)

        def opened(link: FramedLink[Up, Down]) -> None:
            links.append(link)
            tasks.create_task(logic(link))

        server = await asyncio.get_running_loop().create_unix_server(
            lambda: FramedLink(Up, newest_down, opened=opened), path
        )
        try:
            yield
        finally:
            server.close()
            for link in links:
                link.close()
