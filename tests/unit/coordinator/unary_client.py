"""A member without a session, as the tests of this folder play one."""

from __future__ import annotations

from typing import Any

from strata.v1 import barriers_pb2, members_pb2, worlds_pb2
from tests.unit.coordinator.serving_rig import Cluster


class Client:
    """A client in any language: it makes unary calls, each to the replica that a test names."""

    def __init__(self, c: Cluster, worker: str, boot: str = "") -> None:
        self.c = c
        self.worker = worker
        self.boot = boot or f"boot-{worker}"
        self.incarnation = 0

    async def call(self, replica: str, name: str, request: Any) -> Any:
        return await self.c[replica].service.calls.answer(name, request, None)

    async def register(self, replica: str) -> members_pb2.RegisterResponse:
        registration = members_pb2.Registration(
            job="job",
            worker_id=self.worker,
            boot=self.boot,
            slots=1,
            incarnation=self.incarnation,
            spec=worlds_pb2.JobSpec(min_workers=self.c.members, max_workers=self.c.members),
        )
        response: members_pb2.RegisterResponse = await self.call(
            replica, "register", members_pb2.RegisterRequest(registration=registration)
        )
        self.incarnation = response.incarnation
        return response

    async def heartbeat(self, replica: str) -> members_pb2.HeartbeatResponse:
        request = members_pb2.HeartbeatRequest(
            job="job", worker_id=self.worker, boot=self.boot, incarnation=self.incarnation
        )
        response: members_pb2.HeartbeatResponse = await self.call(replica, "heartbeat", request)
        return response

    async def wait(
        self, replica: str, rank: int, round_: int = 1, *, generation: int = 1, timeout_ms: int = 0
    ) -> barriers_pb2.BarrierOutcome:
        arrival = barriers_pb2.Arrival(
            job="job", name="b", generation=generation, round=round_, ranks=[rank], timeout_ms=timeout_ms
        )
        response = await self.call(
            replica,
            "wait_barrier",
            barriers_pb2.WaitBarrierRequest(
                arrival=arrival, worker_id=self.worker, incarnation=self.incarnation
            ),
        )
        outcome: barriers_pb2.BarrierOutcome = response.outcome
        return outcome


async def registered(c: Cluster, worker: str, replica: str) -> Client:
    """Return a client whose worker is registered at that replica."""
    client = Client(c, worker)
    await client.register(replica)
    return client
