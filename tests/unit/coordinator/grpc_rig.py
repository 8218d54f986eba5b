"""One replica behind its real gRPC port on loopback, with the store in memory and the machine's clock."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from strata.config import CoordinatorConfig, Credentials
from strata.coordinator.context import ReplicaContext
from strata.coordinator.replica import Replica
from strata.coordinator.rpc.server import DEBTS, Dialer, Server
from strata.core.access.unsent_answers import DebtLimits, Debts
from strata.core.kv.txn import Put, Txn
from strata.core.timing import Timing
from strata.security.tls import read_pem
from strata.session.link import Link
from strata.testing.links import Switchboard
from strata.testing.memory_store import MemoryStore
from strata.testing.serving import memory_probe
from strata.v1.session_pb2 import Down, Up
from strata.v1.session_pb2_grpc import SessionsStub
from strata.wire.status import translated
from strata.wire.streams import dialled
from strata.wire.tls import open_channel, shown
from tests.raw_member import Member
from tests.secured_fixtures import NOW

LIMIT_S = 20.0
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A serving replica, with its store and its port."""

    context: ReplicaContext
    store: MemoryStore
    port: int
    debts: Debts

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def channel(self, credentials: Credentials) -> grpc.aio.Channel:
        pem = read_pem(credentials, NOW) if credentials.ca_file is not None else None
        return open_channel(self.address, options=OPTIONS, pem=pem)

    def put(self, key: str, value: bytes) -> None:
        self.store.execute(Txn(success=(Put(key=key, value=value),)))

    def member(self, worker: str, credentials: Credentials, tasks: asyncio.TaskGroup) -> Member:
        """Return a member that presents `credentials`, which it reads anew for each connection."""

        @asynccontextmanager
        async def dial(_worker: str, _replica: str) -> AsyncIterator[Link[Down, Up]]:
            async with self.channel(credentials) as channel:
                with translated(self.address):
                    call: Any = SessionsStub(channel).Session(metadata=shown(credentials))
                    async with dialled(call, self.address) as link:
                        yield link

        return Member(worker, dial, tasks, members=1, limit_s=LIMIT_S)


@asynccontextmanager
async def served(config: CoordinatorConfig, debts: DebtLimits = DEBTS) -> AsyncIterator[Served]:
    """Run a replica that leads; `config` must listen at a free port."""
    loop, store, addresses = asyncio.get_running_loop(), MemoryStore(), list[str]()
    owed = list[Debts]()

    class Listening(Server):
        async def start(self) -> str:
            owed.append(self._ledger.debts)
            addresses.append(await super().start())
            return addresses[0]

    replica = Replica(
        config,
        store.client("r1"),
        lambda context, service, read: Listening(context, service, read, debts),
        Dialer(config, Timing.derive(config.detect_s)),
        replica="r1",
        instance="instance-r1-1",
        new_uid="uid-1",
        clock=loop.time,
        unix_now=time.time,
        rng=random.Random(1),
        probe=memory_probe(Switchboard(delay_s=0.0), "r1"),
    )
    running = asyncio.create_task(replica.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            while not addresses or not replica.context.is_ready()[0]:  # there is no event for both
                if running.done():
                    running.result()
                await asyncio.sleep(0.01)
        yield Served(
            context=replica.context, store=store, port=int(addresses[0].rpartition(":")[2]), debts=owed[0]
        )
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
