"""Odd or large requests of a member must be answered, and must harm no replica."""

from __future__ import annotations

import asyncio

import pytest

from strata.errors import InvalidArgument
from strata.testing.virtual_time import in_virtual_time
from strata.v1 import barriers_pb2, members_pb2
from tests.unit.coordinator.serving_rig import JOB, cluster
from tests.unit.coordinator.unary_client import Client


@in_virtual_time()
async def test_ages_that_overflow_int64_harm_no_replica() -> None:
    """Before, both ages were passed on as more than an int64, in tasks whose failure ended the replica."""
    oldest = 2**63 - 1
    async with cluster(members=1) as c:
        client = Client(c, "w0")
        await client.register("r1")
        await c["r1"].see(lambda view: view.get(JOB.head) is not None)
        report = members_pb2.RankProgress(rank=0, step=1, phase="train", age_ms=oldest)
        request = members_pb2.HeartbeatRequest(
            job="job",
            worker_id="w0",
            boot=client.boot,
            incarnation=client.incarnation,
            generation=1,
            ranks=[report],
        )
        await client.call("r1", "heartbeat", request)
        arrival = barriers_pb2.Arrival(
            job="job", name="b", generation=1, round=1, ranks=[0], participants=[0], age_ms=oldest
        )
        wait = barriers_pb2.WaitBarrierRequest(
            arrival=arrival, worker_id="w0", incarnation=client.incarnation
        )
        with pytest.raises(InvalidArgument, match="an age of"):
            await client.call("r1", "wait_barrier", wait)
        await asyncio.sleep(2.5)  # replicas pass progress and arrivals on every second
        listed = await client.call("r1", "list_members", members_pb2.ListMembersRequest(job="job"))
        assert [rank.step for rank in listed.members[0].ranks] == [1]
        await client.call("r2", "list_barriers", barriers_pb2.ListBarriersRequest(job="job"))
