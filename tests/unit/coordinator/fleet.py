"""Whole replicas on the in-memory store in virtual time, with a serving half that serves nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strata.config import CoordinatorConfig
from strata.coordinator.context import ReadResource, ReplicaContext
from strata.coordinator.replica import Replica
from strata.coordinator.service import Service
from strata.core.ids import BootId, WorkerId
from strata.core.invariants import check
from strata.core.job import JobView
from strata.core.keys import ClusterKeys, JobKeys
from strata.core.members import decide_leave, decide_register
from strata.core.records import JobSpec
from strata.core.registration import Registration
from strata.core.view import View
from strata.testing.links import Switchboard
from strata.testing.memory_client import MemoryClient
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Network
from strata.testing.serving import memory_dial
from tests.not_none import not_none

KEYS = ClusterKeys("default")
JOB = KEYS.job("job")


class Idle:
    """A `Serving` that serves nobody, and notes what was asked of it."""

    def __init__(self, context: ReplicaContext, address: str) -> None:
        self.context = context
        self.address = address
        self.calls: list[str] = []

    async def start(self) -> str:
        self.calls.append("start")
        return self.address

    async def run(self) -> None:
        self.calls.append("run")
        await asyncio.Event().wait()

    async def stop(self) -> None:
        leads = self.context.election.epoch is not None
        self.calls.append("stop while leading" if leads else "stop")


class Node:
    """One replica with its connection; `crash` ends it without a goodbye."""

    def __init__(
        self, store: MemoryStore, name: str, network: Network | None, run: int = 1, *, address: str = ""
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.address = address or f"{name}:50051"
        self.client: MemoryClient = store.client(name, network=network)
        self.serving: list[Idle] = []
        self.replica = Replica(
            CoordinatorConfig(),
            self.client,
            self._serve,
            memory_dial(Switchboard(delay_s=0.0), name),
            replica=name,
            instance=f"instance-{name}-{run}",
            new_uid=f"uid-by-{name}",
            clock=loop.time,
            unix_now=loop.time,
            rng=random.Random(1),
        )
        self.context = self.replica.context
        self.task: asyncio.Task[None] | None = None

    def _serve(self, context: ReplicaContext, _service: Service, _read: ReadResource | None) -> Idle:
        self.serving.append(Idle(context, self.address))
        return self.serving[-1]

    @property
    def view(self) -> View:
        return self.context.mirror.view

    def leads(self) -> bool:
        return self.context.election.epoch is not None

    async def crash(self) -> None:
        self.client.partition()
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])

    async def stop(self) -> None:
        self.replica.stop()
        assert self.task is not None
        await self.task


class Fleet:
    """Replicas on one store, and members that are only keys."""

    def __init__(self, store: MemoryStore, tasks: asyncio.TaskGroup) -> None:
        self.store = store
        self.nodes: list[Node] = []
        self._tasks = tasks
        self._runs = 0

    def add(self, name: str, *, network: Network | None = None) -> Node:
        self._runs += 1
        node = Node(self.store, name, network, self._runs)
        node.task = self._tasks.create_task(node.replica.run(), name=name)
        self.nodes.append(node)
        return node

    @property
    def alive(self) -> list[Node]:
        return [n for n in self.nodes if n.task is not None and not n.task.done()]

    async def leader(self) -> Node:
        """Return who leads, once somebody does."""
        while True:
            leading = [n for n in self.alive if n.leads()]
            if leading:
                return leading[0]
            await asyncio.sleep(0.01)

    async def follower(self) -> Node:
        leader = await self.leader()
        return next(n for n in self.alive if n is not leader)

    async def register(self, node: Node, worker: str, **spec: float) -> None:
        registration = Registration(
            worker=WorkerId(worker),
            boot=BootId(f"boot-{worker}"),
            spec=JobSpec(**spec),  # type: ignore[arg-type]  # some are int
        )
        await node.context.executor.settle(
            lambda view: decide_register(JobView(view, JOB), registration, served_by=node.context.instance)
        )

    async def leave(self, node: Node, worker: str) -> None:
        held = not_none(JobView(node.view, JOB).worker(worker))
        await node.context.executor.settle(
            lambda view: decide_leave(JobView(view, JOB), WorkerId(worker), held.create_revision)
        )

    async def generation(self, node: Node, number: int, job: JobKeys = JOB) -> JobView:
        """Return the job once `node` sees that generation."""

        def there(view: View) -> bool:
            head = JobView(view, job).head()
            return head is not None and head.record.generation >= number

        await node.context.mirror.wait_until(there)
        view = JobView(node.view, job)
        assert not_none(view.head()).record.generation == number
        return view


@asynccontextmanager
async def fleet(size: int = 3, *, store: MemoryStore | None = None) -> AsyncIterator[Fleet]:
    """Run replicas; at the end the keyspace must make sense and views must equal the store."""
    async with asyncio.TaskGroup() as tasks:
        made = Fleet(store or MemoryStore(), tasks)
        for number in range(1, size + 1):
            node = made.add(f"r{number}")
            await node.context.mirror.started()
        yield made
        for node in made.alive:
            await node.context.mirror.fresh()
            assert check(node.view, KEYS) == []
            assert node.context.mirror.differences == 0
        for node in made.alive:
            assert node.task is not None
            node.task.cancel()
