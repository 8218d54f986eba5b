"""Test rig of the relay: the test acts as the ranks, and a fake session to a replica answers immediately."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from google.protobuf.message import Message

from strata.agent.environment import Place
from strata.agent.rank_process import RankProcess
from strata.agent.relay import Relay
from strata.errors import StrataError
from strata.session.served import serve
from strata.testing.links import MemoryLink, pair
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome
from strata.v1.common_pb2 import Token
from strata.v1.members_pb2 import RankProgress
from strata.v1.session_pb2 import Down, Up, WorldUpdate
from strata.v1.worlds_pb2 import GetWorldResponse, World, WorldMember

GRACE_S = 1.0


@dataclass(slots=True)
class FakeUpstream:
    token: Token = field(default_factory=lambda: Token(uid="u", revision=9))
    world: WorldUpdate | None = None
    connected: bool = True
    arrived: list[tuple[Arrival, asyncio.Future[BarrierOutcome]]] = field(default_factory=list)
    reported: list[tuple[int, list[int]]] = field(default_factory=list)
    left: list[tuple[int, int]] = field(default_factory=list)
    requests: list[Message] = field(default_factory=list)
    answer: Message | StrataError = field(default_factory=GetWorldResponse)

    def arrive(self, arrival: Arrival) -> asyncio.Future[BarrierOutcome]:
        outcome: asyncio.Future[BarrierOutcome] = asyncio.get_running_loop().create_future()
        self.arrived.append((arrival, outcome))
        return outcome

    def on_progress(self, generation: int, ranks: Sequence[RankProgress]) -> None:
        self.reported.append((generation, [r.rank for r in ranks]))

    def on_detached(self, generation: int, rank: int) -> None:
        self.left.append((generation, rank))

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        self.requests.append(request)
        if isinstance(self.answer, StrataError):
            raise self.answer
        return self.answer


def place(generation: int, *, first_rank: int = 2, slots: int = 2) -> Place:
    return Place(
        job="j",
        worker_id="w",
        world=World(generation=generation, size=4),
        member=WorldMember(incarnation=77, first_rank=first_rank, slots=slots),
        master_addr="",
        master_port=0,
        socket="",
        endpoints="",
        detect_s=5.0,
    )


class Node:
    """A relay, its fake session, and its reports about ranks and their processes."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.upstream = FakeUpstream()
        self.evicted: list[tuple[int, int]] = []
        self.attachments: list[tuple[int, int]] = []
        self.stopped: list[tuple[int, int]] = []
        self.lasting: list[tuple[int, int, str]] = []
        self.processes: list[tuple[int, int, RankProcess]] = []
        self.relay = Relay(
            self.upstream,
            self,
            worker_id="w",
            detect_s=5.0,
            grace_s=GRACE_S,
            listener=self.upstream,
            processes=self,
        )
        self.relay.set_place(place(1))
        self._tasks = tasks
        self._links: list[MemoryLink] = []

    # -- reports of the relay

    def rank_attached(self, rank: int, generation: int) -> None:
        self.attachments.append((rank, generation))

    def rank_supports_graceful_stop(self, rank: int, generation: int) -> None: ...

    def rank_stepped(self, rank: int, generation: int) -> None: ...

    def rank_cannot_go_on(self, rank: int, generation: int, reason: str) -> None:
        self.lasting.append((rank, generation, reason))

    def rank_stopped(self, rank: int, generation: int) -> None:
        self.stopped.append((rank, generation))

    def may_request_stop(self) -> bool:
        return True

    def evict(self, rank: int, generation: int, reason: str) -> None:
        assert "did not attach again" in reason
        self.evicted.append((rank, generation))

    def watch(self, rank: int, generation: int, process: RankProcess) -> None:
        self.processes.append((rank, generation, process))

    def forget(self) -> None: ...

    # -- ranks

    async def dial(
        self,
        rank: int,
        *,
        generation: int = 1,
        job: str = "j",
        worker: str = "w",
        in_process: bool = False,
        process: RankProcess | None = None,
    ) -> MemoryLink:
        """Open a session as a rank does; the caller reads the messages from the relay."""
        ours, theirs = pair()
        self._tasks.create_task(serve(theirs, partial(self.relay.accept, process=process)))
        self._links.append(ours)
        hello = {"job": job, "worker_id": worker, "generation": generation, "rank": rank}
        hello["in_process"] = in_process
        ours.send(up(hello={"rank": hello}))
        return ours

    async def attached(
        self, rank: int, *, generation: int = 1, in_process: bool = False, pid: int | None = None
    ) -> MemoryLink:
        """Open a session, as process `pid` if given; return its link after the Welcome."""
        process = None if pid is None else RankProcess(pid)
        link = await self.dial(rank, generation=generation, in_process=in_process, process=process)
        assert (await link.recv()).WhichOneof("message") == "welcome"
        return link

    def hang_up(self) -> None:
        for link in self._links:
            link.close()


def up(**message: Any) -> Up:
    """Return an `Up` whose nested messages are dicts; protobuf accepts those, its type stubs do not."""
    return Up(**message)


def arrivals(rank: int, *, generation: int = 1, ranks: Sequence[int] | None = None) -> Up:
    one = Arrival(job="j", name="b", generation=generation, round=4, ranks=ranks or [rank])
    return up(arrivals={"arrivals": [one]})


async def news(link: MemoryLink) -> Down:
    """Return the next message that is not a tick."""
    while True:
        down = await link.recv()
        assert isinstance(down, Down)
        if down.WhichOneof("message") != "tick":
            return down


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        it = Node(tasks)
        stack.callback(it.hang_up)
        yield it
