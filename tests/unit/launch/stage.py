"""Test rig of the local agent: a fake session, and tiny real commands as ranks."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from strata.agent.agent import Agent, AgentConfig
from strata.agent.environment import Place
from strata.agent.rendezvous import Meeting
from strata.config import RunConfig
from strata.errors import ConfigError
from strata.launch.local_agent import LocalAgent
from strata.launch.warm.starting import ColdStarter
from strata.session.endpoints import parse_endpoints
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED, Arrival, BarrierOutcome
from strata.v1.common_pb2 import Token
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import (
    JOB_PHASE_RUNNING,
    JobPhase,
    RestorePoint,
    StopNotice,
    World,
    WorldMember,
)

LIMIT_S = 20.0
FOREVER = ("sleep", "1000")


@dataclass(frozen=True, slots=True)
class Exit:
    generation: int
    rank: int
    code: int
    reason: str


@dataclass(slots=True)
class FakeUpstream:
    """A session that records the agent's messages; the test releases its barriers."""

    arrivals: asyncio.Queue[tuple[Arrival, asyncio.Future[BarrierOutcome]]] = field(
        default_factory=asyncio.Queue
    )
    exits: asyncio.Queue[Exit] = field(default_factory=asyncio.Queue)
    calls: asyncio.Queue[tuple[Message, asyncio.Future[Message]]] = field(default_factory=asyncio.Queue)
    left: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    deaf: asyncio.Event | None = None
    """If set, the session confirms reports only after this event."""

    async def arrive(self, arrival: Arrival) -> BarrierOutcome:
        outcome: asyncio.Future[BarrierOutcome] = asyncio.get_running_loop().create_future()
        self.arrivals.put_nowait((arrival, outcome))
        return await outcome

    async def rank_exit(
        self, *, generation: int, rank: int, code: int, reason: str, early: bool = False
    ) -> None:
        self.exits.put_nowait(Exit(generation, rank, code, reason))
        if self.deaf is not None:
            await self.deaf.wait()

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.calls.put_nowait((request, answer))
        return await answer

    async def leave(self, reason: str) -> None:
        self.left.put_nowait(reason)


def update(
    generation: int,
    *,
    first_rank: int | None = 0,
    slots: int = 1,
    size: int = 4,
    phase: JobPhase.ValueType = JOB_PHASE_RUNNING,
    revision: int | None = None,
    restore: RestorePoint | None = None,
    notice: StopNotice | None = None,
) -> WorldUpdate:
    """Return a world as a replica sends it; if `first_rank` is None, this member is a standby."""
    place = (
        None
        if first_rank is None
        else WorldMember(worker_id="w", incarnation=7, group_rank=1, slots=slots, first_rank=first_rank)
    )
    return WorldUpdate(
        world=World(generation=generation, size=size, members=2, reason="as told", restore=restore),
        place=place,
        phase=phase,
        token=Token(uid="u", revision=generation * 100 if revision is None else revision),
        notice=notice,
    )


@dataclass(slots=True)
class FakeRankSocket:
    """A relay that records the places it receives; the test acts as its ranks."""

    places: asyncio.Queue[Place | None] = field(default_factory=asyncio.Queue)
    moves: asyncio.Queue[tuple[int, frozenset[int]]] = field(default_factory=asyncio.Queue)
    movable: frozenset[int] = frozenset()

    def set_place(self, place: Place | None) -> None:
        self.places.put_nowait(place)

    def in_process(self) -> frozenset[int]:
        return self.movable

    def move(self, place: Place, local_ranks: Collection[int]) -> None:
        self.moves.put_nowait((place.generation, frozenset(local_ranks)))


class Stage:
    """A running local agent, its fake session, and the places it passed to its relay."""

    def __init__(
        self,
        command: tuple[str, ...],
        folder: Path,
        *,
        wait_graceful_stop_support: bool = False,
        **settings: Any,
    ) -> None:
        self.upstream = FakeUpstream()
        self.rank_socket = FakeRankSocket()
        config = RunConfig(**{"job": "j", "stop_grace_s": 10.0, "restart_grace_s": 10.0, **settings})
        agent = Agent(
            AgentConfig(
                job=config.job,
                worker_id="w",
                endpoints=parse_endpoints("192.0.2.9:1"),
                shown_endpoints="",
                address="192.0.2.1",
                join_timeout_s=config.join_timeout_s,
                preempt=config.preempt,
                preempt_grace_s=config.preempt_grace_s,
            ),
            self.upstream,
            socket=folder / "ranks.sock",
            detect_s=5.0,
        )
        agent.admission = self.rank_socket
        self.local_agent = LocalAgent(
            config,
            ColdStarter(command),
            agent,
            folder=folder,
            wait_graceful_stop_support=lambda: wait_graceful_stop_support,
        )
        self.done = asyncio.create_task(self.local_agent.run())

    async def join(self, meeting: Meeting | None = None) -> Arrival:
        """Release the next join barrier at which the agent arrives; return its arrival."""
        arrival, outcome = await self.upstream.arrivals.get()
        payload = arrival.payloads[0] if meeting is None else meeting.encode()
        outcome.set_result(
            BarrierOutcome(name=arrival.name, result=BARRIER_RESULT_RELEASED, payloads={0: payload})
        )
        return arrival

    async def started(self) -> Place:
        """Return the next place that the agent starts ranks for."""
        while (place := await self.rank_socket.places.get()) is None:
            pass
        return place

    async def enter(self, world: WorldUpdate) -> Place:
        """Deliver a world, release its barrier, and return the agent's place."""
        self.local_agent.on_world(world)
        await self.join(Meeting("192.0.2.1", 4711))
        return await self.started()


@contextlib.asynccontextmanager
async def stage(*command: str, **settings: Any) -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory() as folder:
        async with asyncio.timeout(LIMIT_S):
            it = Stage(command, Path(folder), **settings)
            try:
                yield it
            finally:
                it.done.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConfigError):
                    await it.done


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)
