"""A test's stand-in for one member's process: it speaks the session's protocol and does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from strata.errors import StrataError
from strata.v1 import barriers_pb2, checkpoints_pb2, members_pb2, session_pb2, worlds_pb2
from strata.v1.session_pb2 import Down, Up

Dial = Callable[[str, str], AbstractAsyncContextManager[Any]]
"""Takes a worker's name and a replica's name; opens a session's link for the worker."""


class Member:
    """One member's process: sends the test's messages, and records the messages it receives."""

    def __init__(
        self,
        worker: str,
        dial: Dial,
        tasks: asyncio.TaskGroup,
        *,
        members: int,
        limit_s: float,
        slots: int = 1,
        boot: str = "",
        job: str = "job",
    ) -> None:
        self.worker = worker
        self.boot = boot or f"boot-{worker}"
        self.slots = slots
        self.job = job
        self.incarnation = 0
        self.received: list[Down] = []
        self.error: StrataError | None = None
        self.over = asyncio.Event()
        self.link: Any = None
        self._dial = dial
        self._tasks = tasks
        self._spec = worlds_pb2.JobSpec(min_workers=members, max_workers=members)
        self._limit_s = limit_s
        self._news = asyncio.Event()
        self._session: asyncio.Task[None] | None = None

    # -- connecting

    async def connect(self, replica: str, **registration: Any) -> Member:
        """Drop the previous session and begin one with `replica`; return once its welcome is received."""
        self.dial(replica, **registration)
        await self.next("welcome")
        return self

    def dial(self, replica: str, **registration: Any) -> None:
        """Begin a session without waiting for its welcome."""
        self.drop()
        self.received, self.error, self.over = [], None, asyncio.Event()
        self._session = self._tasks.create_task(self._talk(replica, registration))

    async def _talk(self, replica: str, registration: dict[str, Any]) -> None:
        over = self.over
        try:
            async with self._dial(self.worker, replica) as link:
                self.link = link
                hello = members_pb2.Registration(
                    job=self.job,
                    worker_id=self.worker,
                    boot=self.boot,
                    host="host",
                    slots=self.slots,
                    incarnation=self.incarnation,
                    spec=self._spec,
                )
                hello.MergeFrom(members_pb2.Registration(**registration))
                link.send(Up(hello=session_pb2.Hello(member=hello)))
                while (down := await link.recv()) is not None:
                    if down.HasField("welcome"):
                        self.incarnation = down.welcome.incarnation
                    self.received.append(down)
                    self._news.set()
        except StrataError as error:
            self.error = error
        finally:
            over.set()
            self._news.set()

    def drop(self) -> None:
        """Lose the connection, as a process that was killed does."""
        self.link = None
        if self._session is not None:
            self._session.cancel()
            self._session = None

    # -- receiving

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Return the first true answer of `condition`, which is evaluated after each received message."""
        async with asyncio.timeout(self._limit_s):
            while not (answer := condition()):
                self._news.clear()
                await self._news.wait()
            return answer

    def all(self, kind: str) -> list[Any]:
        return [getattr(down, kind) for down in self.received if down.WhichOneof("message") == kind]

    async def next(self, kind: str, *, after: int = 0) -> Any:
        """Return message number `after` of this kind, counted from 0, once it is received."""

        def found() -> Any:
            assert not self.over.is_set() or len(self.all(kind)) > after, f"ended: {self.error}"
            return len(self.all(kind)) > after

        await self.until(found)
        return self.all(kind)[after]

    async def world(self, generation: int = 1) -> session_pb2.WorldUpdate:
        """Return the newest update of that generation."""

        def found() -> list[Any]:
            return [w for w in self.all("world") if w.world.generation == generation]

        found_updates: list[session_pb2.WorldUpdate] = await self.until(found)
        return found_updates[-1]

    async def outcome(self, round_: int = 1, name: str = "b") -> barriers_pb2.BarrierOutcome:
        """Return the outcome of a round."""

        def found() -> barriers_pb2.BarrierOutcome | None:
            for message in self.all("outcomes"):
                for outcome in message.outcomes:
                    if (outcome.name, outcome.round) == (name, round_):
                        assert isinstance(outcome, barriers_pb2.BarrierOutcome)
                        return outcome
            return None

        answer: barriers_pb2.BarrierOutcome = await self.until(found)
        return answer

    async def save(self, state: int, *, acked: int = 0) -> checkpoints_pb2.Checkpoint:
        """Return the first message about a save in this state with at least so many acks."""

        def found() -> list[checkpoints_pb2.Checkpoint]:
            return [s for s in self.all("checkpoint") if s.state == state and len(s.acked) >= acked]

        saves: list[checkpoints_pb2.Checkpoint] = await self.until(found)
        return saves[0]

    # -- sending

    def send(self, **message: Any) -> None:
        assert self.link is not None
        self.link.send(Up(**message))

    def arrive(
        self,
        ranks: Iterable[int],
        round_: int = 1,
        *,
        name: str = "b",
        generation: int = 1,
        **more: Any,
    ) -> None:
        arrival = barriers_pb2.Arrival(
            job=self.job, name=name, generation=generation, round=round_, ranks=ranks, **more
        )
        self.send(arrivals=session_pb2.Arrivals(arrivals=[arrival]))

    async def call(self, **request: Any) -> session_pb2.Reply:
        """Make a call and return its reply."""
        call_id = 1000 + len(self.received)
        self.send(call=session_pb2.Call(id=call_id, **request))

        def found() -> list[session_pb2.Reply]:
            return [reply for reply in self.all("reply") if reply.id == call_id]

        replies: list[session_pb2.Reply] = await self.until(found)
        return replies[0]
