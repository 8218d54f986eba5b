"""Three coordinator processes on the shared etcd, quick to kill and restart, and members that the test drives."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio

from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.ports import free_ports
from strata.processes.children import Child
from strata.session.link import Link
from strata.v1.admin_pb2 import GetStatusRequest, GetStatusResponse
from strata.v1.admin_pb2_grpc import AdminStub
from strata.v1.session_pb2 import Down, Up
from strata.v1.session_pb2_grpc import SessionsStub
from strata.wire.status import translated
from strata.wire.streams import dialled
from tests.raw_member import Member

PROGRAM = Path(__file__).with_name("coordinator") / "warm_coordinator.py"
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
OPTIONS: list[tuple[str, int]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 200),
]


class WarmReplica:
    """One replica: its address, the process that serves at it, and (if `spare`) the prestarted next process.

    Every process has its own name, so that no process waits for the lease of its predecessor.
    """

    def __init__(
        self,
        name: str,
        port: int,
        options: list[str],
        logs: Path,
        *,
        spare: bool,
        program: Path,
        env: Mapping[str, str],
    ) -> None:
        self.name = name
        self._program = program
        self._env = env
        self.address = f"127.0.0.1:{port}"
        self._options = [f"--listen={self.address}", *options]
        self._run = 0
        self._log = logs / f"{name}.log"
        self._keep_spare = spare
        self._spare: tuple[Child, int] | None = None
        self.start()

    def _warm(self) -> tuple[Child, int]:
        stdin, write = os.pipe()
        self._run += 1
        try:
            child = Child.start(
                [sys.executable, self._program, f"--replica={self.name}-{self._run}", *self._options],
                name=self.name,
                log=self._log,
                stdin=stdin,
                env={**os.environ, "PYTHONPATH": str(ROOT), "GRPC_ENABLE_FORK_SUPPORT": "0", **self._env},
            )
        finally:
            os.close(stdin)
        return child, write

    def start(self) -> None:
        """Let the prestarted process serve, and prestart another one."""
        self.child, write = self._spare or self._warm()
        os.write(write, b"\n")
        os.close(write)
        self._spare = self._warm() if self._keep_spare else None

    def kill(self) -> None:
        """Send SIGKILL and wait for the process to end."""
        self.child.kill()
        self.child.join()

    def end(self) -> None:
        self.child.resume()
        self.kill()
        if self._spare is not None:
            os.close(self._spare[1])
            self._spare[0].join()

    async def status(self) -> GetStatusResponse | None:
        """Return the replica's status, or None if it does not answer."""
        async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
            try:
                return await AdminStub(channel).GetStatus(GetStatusRequest(), timeout=1.0)
            except grpc.aio.AioRpcError:
                return None


class Replicas:
    """A control plane for one test, on an etcd that other tests use too."""

    def __init__(
        self,
        etcd: EtcdCluster,
        cluster: str,
        logs: Path,
        *,
        detect_s: float = 5.0,
        spares: bool = False,
        ways: Mapping[str, str] | None = None,
        program: Path = PROGRAM,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`ways` maps the name of a replica to separate etcd endpoints for it, such as a forwarder's.

        Each replica runs `program`, with `env` added to its environment.
        """
        ways = ways or {}
        direct = ",".join(etcd.endpoints)
        options = [
            f"--cluster={cluster}",
            f"--detect-s={detect_s:g}",
            "--http=127.0.0.1:0",
            "--log-format=json",
        ]
        self._all = [
            WarmReplica(
                f"r{number}",
                port,
                [*options, f"--etcd={ways.get(f'r{number}', direct)}"],
                logs,
                spare=spares,
                program=program,
                env=env or {},
            )
            for number, port in enumerate(free_ports(3), 1)
        ]
        self._made: list[Member] = []
        self.tasks = asyncio.TaskGroup()
        self.members = 0
        self.job = "job"

    def __getitem__(self, name: str) -> WarmReplica:
        return next(replica for replica in self._all if replica.name == name)

    @property
    def names(self) -> list[str]:
        return [replica.name for replica in self._all]

    def close(self) -> None:
        """Kill every process."""
        for replica in self._all:
            replica.end()

    async def __aenter__(self) -> Self:
        """Wait until every replica is ready, and open the task group of members, for one test."""
        self.tasks = asyncio.TaskGroup()
        await self.tasks.__aenter__()
        await self.ready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self._made:
            member.drop()
        self._made.clear()
        await self.tasks.__aexit__(kind, error, trace)

    async def ready(self) -> None:
        """Return once all replicas see each other as ready."""
        async with asyncio.timeout(LIMIT_S):
            for replica in self._all:
                while not await self._knows_all(replica):  # noqa: ASYNC110  # polls another process
                    await asyncio.sleep(0.02)  # polls another process

    async def _knows_all(self, replica: WarmReplica) -> bool:
        status = await replica.status()
        if status is None:
            return False
        return sum(r.ready for r in status.replicas) == len(self._all)

    async def leader(self) -> str:
        """Return the leader's name once there is a leader."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for replica in self._all:
                    status = await replica.status()
                    if status is not None and status.leader:
                        return status.leader.partition("-")[0]
                await asyncio.sleep(0.02)

    def member(self, worker: str, **more: Any) -> Member:
        made = Member(
            worker, self._dial, self.tasks, members=self.members, limit_s=LIMIT_S, job=self.job, **more
        )
        self._made.append(made)
        return made

    async def world(self, *where: str) -> list[Member]:
        """Form a world of one member at each of these replicas; return the members in rank order."""
        self.members = len(where)
        made = [await self.member(f"w{number}").connect(name) for number, name in enumerate(where)]
        ranks = {m.worker: (await m.world()).place.first_rank for m in made}
        return sorted(made, key=lambda member: ranks[member.worker])

    @asynccontextmanager
    async def _dial(self, _worker: str, name: str) -> AsyncIterator[Link[Down, Up]]:
        address = self[name].address
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            with translated(address):
                call: Any = SessionsStub(channel).Session()
                async with dialled(call, address) as link:
                    yield link


@asynccontextmanager
async def started(
    etcd: EtcdCluster,
    cluster: str,
    logs: Path,
    *,
    detect_s: float = 5.0,
    spares: bool = False,
    ways: Mapping[str, str] | None = None,
    program: Path = PROGRAM,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Replicas]:
    """Run replicas for one test alone."""
    made = Replicas(
        etcd, cluster, logs, detect_s=detect_s, spares=spares, ways=ways, program=program, env=env
    )
    with closing(made) as replicas:
        async with replicas:
            yield replicas
