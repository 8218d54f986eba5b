"""`MemoryReplica`: a whole replica of shipped code, on the in-memory store and in-memory links."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from strata.config import CoordinatorConfig
from strata.coordinator.context import ReadResource, ReplicaContext, Serving
from strata.coordinator.replica import Replica
from strata.coordinator.service import Service
from strata.core.kv.view import View
from strata.core.leadership.takeover import Probe
from strata.testing.links import Switchboard
from strata.testing.memory_client import MemoryClient
from strata.testing.processes import Process
from strata.testing.serving import MemoryServing, memory_dial, memory_probe


async def unknown_probe(_address: str) -> Probe:
    """Return `UNCLEAR`, as if no probe were possible: a dead leader is then detected only when its lease expires."""
    return Probe.UNCLEAR


class MemoryReplica:
    """One run of one replica, in its own `Process`; `kill` ends it as SIGKILL would."""

    def __init__(
        self,
        client: MemoryClient,
        board: Switchboard,
        *,
        name: str,
        run: int = 1,
        new_uid: str = "uid-1",
        config: CoordinatorConfig | None = None,
        serves: Callable[[ReplicaContext], Serving] | None = None,
    ) -> None:
        """`serves` replaces the serving half; a plain connect can then not show whether this replica is alive."""
        loop = asyncio.get_running_loop()
        self.name = name
        self.client = client
        self.process = Process(name)
        self.skew_s = 0.0
        """Added to this replica's clock, to simulate a suspend that the loop's clock did not see."""
        self.serving: MemoryServing | None = None
        self._board = board
        self.replica = Replica(
            config or CoordinatorConfig(),
            client,
            self._serve if serves is None else lambda context, _service, _read: serves(context),
            memory_dial(board, name),
            replica=name,
            instance=f"instance-{name}-{run}",
            new_uid=new_uid,
            clock=lambda: loop.time() + self.skew_s,
            unix_now=loop.time,
            rng=random.Random(f"{name}/{run}"),
            probe=memory_probe(board, name) if serves is None else unknown_probe,
        )
        self.context: ReplicaContext = self.replica.context

    def _serve(self, _context: ReplicaContext, service: Service, _read: ReadResource | None) -> MemoryServing:
        self.serving = MemoryServing(self._board, self.name, service)
        return self.serving

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run the replica, owned by `tasks`."""
        self.process.start(self.replica.run(), tasks=tasks)

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that runs the replica."""
        return self.process.task

    @property
    def service(self) -> Service:
        return self.replica.service

    @property
    def view(self) -> View:
        return self.context.mirror.view

    @property
    def alive(self) -> bool:
        """Whether the replica runs, frozen or not."""
        return self.process.alive and not self.client.cut_off

    @property
    def leads(self) -> bool:
        """Whether the replica considers itself the leader now."""
        return self.context.election.epoch is not None

    def kill(self) -> None:
        """End immediately: the replica sends, receives and writes nothing more."""
        self.client.partition()
        if self.serving is not None:
            self.serving.vanish()
        self.process.thaw()
        if self.process.task is not None:
            self.process.task.cancel()

    async def crash(self) -> None:
        """Kill the replica; return once its task has ended."""
        self.kill()
        if self.process.task is not None:
            await asyncio.wait([self.process.task])
