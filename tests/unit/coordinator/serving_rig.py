"""Three whole replicas, joined by links in memory, and members that send the messages of a test."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Concatenate, ParamSpec

from strata.coordinator.context import ReplicaContext
from strata.core.ids import BootId, WorkerId
from strata.core.invariants import check
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import JobSpec, Worker
from strata.core.kv.txn import Decision, Delete, Put, Txn, read_prefix
from strata.core.kv.view import Entry, View
from strata.core.members.membership import decide_leave, decide_register
from strata.core.members.registration import Registration
from strata.testing.links import MemoryLink, Switchboard
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Network
from strata.testing.replicas import MemoryReplica
from strata.testing.serving import peer_address
from tests.not_none import not_none
from tests.raw_member import Member
from tests.unit.coordinator.rig import in_rig, shown_as

__all__ = ["JOB", "KEYS", "LIMIT_S", "Cluster", "Member", "Node", "cluster"]

KEYS = ClusterKeys("default")
JOB = KEYS.job("job")
_P = ParamSpec("_P")

LIMIT_S = 120.0
"""Virtual seconds that a test waits for an expected event."""


class Idle:
    """A `Serving` that serves no member, and records the calls to it."""

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


class Node(MemoryReplica):
    """One replica of a cluster; `crash` ends it as SIGKILL would."""

    def __init__(
        self, cluster: Cluster, name: str, run: int = 1, network: Network | None = None, *, address: str = ""
    ) -> None:
        self.address = address or f"{name}:50051"
        self.idle: Idle | None = None
        super().__init__(
            cluster.store.client(name, network=network),
            cluster.board,
            name=name,
            run=run,
            serves=self._idle if cluster.idle else None,
        )

    def _idle(self, context: ReplicaContext) -> Idle:
        self.idle = Idle(context, self.address)
        return self.idle

    async def stop(self) -> None:
        self.replica.stop()
        await not_none(self.task)

    async def see(self, what: Callable[[View], bool]) -> None:
        """Return once the view of this replica satisfies `what`."""
        async with asyncio.timeout(LIMIT_S):
            await self.context.mirror.wait_until(what)

    async def settle(self, decide: Callable[[JobView], Decision], **options: Any) -> None:
        """Execute the transactions that `decide` returns for the job."""
        await self.context.executor.settle(lambda view: decide(JobView(view, JOB)), **options)


class Cluster:
    """Replicas on one store, and one job with `members` members.

    Replicas of an `idle` cluster serve no member: the members of such a cluster are only keys (`register`, `leave`).
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        members: int = 3,
        delay_s: float = 0.0002,
        idle: bool = False,
        store: MemoryStore | None = None,
    ) -> None:
        self.store = store or MemoryStore()
        self.idle = idle
        self.board = Switchboard(delay_s=delay_s)
        self.tasks = tasks
        self.members = members
        self.nodes: dict[str, Node] = {}
        self._runs = 0
        self.made: list[Member] = []

    def add(self, name: str, *, network: Network | None = None) -> Node:
        """Start a replica, for the first time or again."""
        self._runs += 1
        node = self.nodes[name] = Node(self, name, self._runs, network)
        node.start(self.tasks)
        return node

    async def start(self, *names: str, network: Network | None = None) -> Node:
        """Start replicas; return the last of them once every replica serves."""
        nodes = [self.add(name, network=network) for name in names]
        await self.ready()
        return nodes[-1]

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    @property
    def all(self) -> list[Node]:
        return list(self.nodes.values())

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    async def ready(self) -> None:
        """Return once every replica serves, and counts every other replica as ready."""
        everybody = {node.context.instance for node in self.alive}
        async with asyncio.timeout(LIMIT_S):
            for node in self.alive:
                others = everybody - {node.context.instance}
                while node.serving is None or set(node.service.peers.ready()) != others:  # noqa: ASYNC110  # virtual
                    await asyncio.sleep(0.05)

    async def leader(self) -> Node:
        """Return the leader, once there is one."""
        while not (leading := [node for node in self.alive if node.leads]):  # noqa: ASYNC110  # virtual
            await asyncio.sleep(0.01)
        return leading[0]

    async def follower(self) -> Node:
        leader = await self.leader()
        return next(node for node in self.alive if node is not leader)

    async def register(self, node: Node, worker: str, **spec: Any) -> None:
        """Register a member that is only a key."""
        new = Registration(worker=WorkerId(worker), boot=BootId(f"boot-{worker}"), spec=JobSpec(**spec))
        await node.settle(lambda job: decide_register(job, new, served_by=node.context.instance))

    async def leave(self, node: Node, worker: str) -> None:
        held = not_none(JobView(node.view, JOB).worker(worker))
        await node.settle(lambda job: decide_leave(job, WorkerId(worker), held.create_revision))

    async def generation(self, node: Node, number: int) -> JobView:
        """Return the job once `node` sees that generation, which must be the job's newest."""
        job = JobView(node.view, JOB)

        def there(_view: View) -> bool:
            head = job.head()
            return head is not None and head.record.generation >= number

        await node.see(there)
        assert not_none(job.head()).record.generation == number
        return job

    def member(self, worker: str, **more: Any) -> Member:
        made = Member(worker, self._dial, self.tasks, members=self.members, limit_s=LIMIT_S, **more)
        self.made.append(made)
        return made

    async def joined(self, worker: str, replica: str) -> Member:
        """Return a member once `replica` has welcomed it."""
        return await self.member(worker).connect(replica)

    def _dial(self, worker: str, replica: str) -> AbstractAsyncContextManager[MemoryLink]:
        return self.board.dial(f"client-{worker}", replica)

    async def world(self, *where: str, slots: int = 1) -> list[Member]:
        """Return one member at each of these replicas, in a world, in the order of their ranks."""
        made = [
            await self.member(f"w{number}", slots=slots).connect(replica)
            for number, replica in enumerate(where)
        ]
        for member in made:
            await member.world()
        places = {m.worker: (await m.world()).place.first_rank for m in made}
        return sorted(made, key=lambda member: places[member.worker])

    def worker(self, name: str) -> Entry[Worker] | None:
        """Return a worker's entry as the store has it."""
        now = self.store.read(read_prefix(KEYS.root))
        view = View()
        view.reset(now.revision, now.kvs)
        return JobView(view, JOB).worker(name)

    def put(self, key: str, value: bytes) -> None:
        self.store.execute(Txn(success=(Put(key=key, value=value),)))

    def delete(self, key: str) -> None:
        self.store.execute(Txn(success=(Delete(key=key),)))

    def kill(self, name: str) -> None:
        self[name].kill()

    def cut_off(self, name: str) -> None:
        """Cut a replica off from etcd."""
        self[name].client.partition()

    def partition(self, one: str, other: str) -> None:
        """Cut the links between two replicas, both ways."""
        self.board.cut(one, peer_address(other))
        self.board.cut(other, peer_address(one))

    def heal(self, one: str, other: str) -> None:
        self.board.mend(one, peer_address(other))
        self.board.mend(other, peer_address(one))

    def end(self) -> None:
        for member in self.made:
            member.drop()
        for node in self.nodes.values():
            not_none(node.task).cancel()


def in_cluster(
    make: Callable[..., Any], *args: Any, replicas: int = 3, **options: Any
) -> Callable[[Callable[Concatenate[Cluster, Any, _P], Coroutine[Any, Any, None]]], Callable[_P, None]]:
    """Make an `async def` test that gets a `cluster` and the result of `make` on it."""

    def decorate(
        test: Callable[Concatenate[Cluster, Any, _P], Coroutine[Any, Any, None]],
    ) -> Callable[_P, None]:
        @in_rig(cluster, replicas, **options)
        async def within(c: Cluster, /, *given: _P.args, **named: _P.kwargs) -> None:
            made = make(c, *args)
            await test(c, await made if inspect.isawaitable(made) else made, *given, **named)

        return shown_as(test, within, given=2)

    return decorate


in_world = partial(in_cluster, Cluster.world)
"""Make an `async def` test that gets a `cluster` and the members of a world, by rank, at these replicas."""


@asynccontextmanager
async def cluster(replicas: int = 3, **options: Any) -> AsyncIterator[Cluster]:
    """Run replicas; at the end the keyspace must be consistent and every view must equal the store."""
    async with asyncio.TaskGroup() as tasks:
        made = Cluster(tasks, **options)
        for number in range(1, replicas + 1):
            node = made.add(f"r{number}")
            if made.idle:
                await node.context.mirror.started()
        if not made.idle:
            await made.ready()
        yield made
        for node in made.alive:
            await node.context.mirror.fresh()
            assert check(node.view, KEYS) == []
            assert node.context.mirror.differences == 0
        made.end()
