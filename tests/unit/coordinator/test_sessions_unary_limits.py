"""What one member asks for, however odd or large, harms no replica and is answered."""

from __future__ import annotations

import asyncio

import pytest

from strata.coordinator.calls.pages import ANSWER_BYTES
from strata.errors import InvalidArgument
from strata.testing.virtual_time import in_virtual_time
from strata.v1 import barriers_pb2, datasets_pb2, members_pb2
from strata.wire.pages import whole_async
from tests.unit.coordinator.serving_rig import JOB, Cluster, cluster, in_cluster
from tests.unit.coordinator.unary_client import Client, registered


@in_virtual_time()
async def test_ages_that_no_message_holds_do_no_harm() -> None:
    """Both were passed on as more than an int64, in tasks whose failure ended the replica."""
    oldest = 2**63 - 1
    async with cluster(members=1) as c:
        client = Client(c, "w0")
        await client.register("r1")
        await c["r1"].see(lambda view: view.get(JOB.head) is not None)
        said = members_pb2.RankProgress(rank=0, step=1, phase="train", age_ms=oldest)
        request = members_pb2.HeartbeatRequest(
            job="job",
            worker_id="w0",
            boot=client.boot,
            incarnation=client.incarnation,
            generation=1,
            ranks=[said],
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
        await asyncio.sleep(2.5)  # progress and arrivals are passed on every second
        listed = await client.call("r1", "list_members", members_pb2.ListMembersRequest(job="job"))
        assert [rank.step for rank in listed.members[0].ranks] == [1]
        await client.call("r2", "list_barriers", barriers_pb2.ListBarriersRequest(job="job"))


@in_cluster(registered, "w0", "r1", members=1)
async def test_lists_fit_into_a_message_whatever_is_in_them(c: Cluster, client: Client) -> None:
    """A message has 4 MiB: ten rounds with full payloads, or datasets with long URIs, had more."""
    await c["r1"].see(lambda view: view.get(JOB.head) is not None)
    for number in range(700):
        arrival = barriers_pb2.Arrival(
            job="job", name=f"b{number}", generation=1, round=1, ranks=[0], payloads=[b"x" * 4000]
        )
        wait = barriers_pb2.WaitBarrierRequest(
            arrival=arrival, worker_id="w0", incarnation=client.incarnation
        )
        await client.call("r1", "wait_barrier", wait)
        await client.heartbeat("r1")
    told = await whole_async(
        lambda page: client.call("r1", "list_barriers", page), barriers_pb2.ListBarriersRequest(job="job")
    )
    assert [one.name for one in told.recent] == sorted(f"b{number}" for number in range(700))
    assert all(one.payloads[0] == b"x" * 4000 for one in told.recent)
    for number in range(30):
        dataset = datasets_pb2.Dataset(name=f"d{number:02}", shards=1, uri="/" + "x" * 60_000)
        await client.call(
            "r1", "register_dataset", datasets_pb2.RegisterDatasetRequest(job="job", dataset=dataset)
        )
    first = await client.call("r1", "list_datasets", datasets_pb2.ListDatasetsRequest(job="job"))
    assert first.ByteSize() <= ANSWER_BYTES
    assert [one.name for one in first.datasets] == [f"d{n:02}" for n in range(4)]
    rest = datasets_pb2.ListDatasetsRequest(job="job", page_token=first.next_page_token)
    others = await whole_async(lambda page: client.call("r1", "list_datasets", page), rest)
    assert [one.name for one in others.datasets] == [f"d{n:02}" for n in range(4, 30)]
