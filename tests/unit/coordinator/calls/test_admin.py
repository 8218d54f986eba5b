"""GetStatus, and the warning about a full etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from strata.coordinator.calls.admin import AdminCalls
from strata.coordinator.calls.table import NO_SESSION, Calls
from strata.coordinator.context import ReadResource
from strata.coordinator.controllers.compaction import Compaction
from strata.coordinator.controllers.loop import drive
from strata.coordinator.etcd.members import EtcdMember
from strata.coordinator.peers.registry import NOT_RECEIVED
from strata.core.access.authority import Identity, Role
from strata.errors import QuotaExceeded, Unavailable
from strata.testing.virtual_time import in_virtual_time
from strata.v1.admin_pb2 import GetResourceRequest, GetStatusRequest
from strata.v1.common_pb2 import Token
from tests.unit.coordinator.rig import in_rig, rig
from tests.unit.coordinator.serving_rig import Cluster, Node, cluster, in_cluster


def requested(node: Node, *, last_seen: Sequence[str] = (), read: ReadResource | None = None) -> Calls:
    """Return the admin calls of this replica, with `heard` as its ready peers and seven sessions."""
    calls = AdminCalls(
        node.context, read, peer_ready=lambda instance: instance in last_seen, sessions=lambda: 7
    )
    return Calls(node.context.mirror, calls.rows(), cluster="default")


@in_rig(cluster, idle=True)
async def test_the_status_names_the_replicas_the_leader_and_the_answering_replica(f: Cluster) -> None:
    leader, node = await f.leader(), await f.follower()
    await f.register(node, "w")
    await asyncio.sleep(2)
    ready_peer = leader.context.instance
    answer = await requested(node, last_seen=[ready_peer]).answer(
        "get_status", GetStatusRequest(), NO_SESSION
    )
    assert answer.cluster == "default"
    assert answer.leader == leader.name
    assert answer.leader_epoch == leader.context.election.epoch
    assert answer.answered_by == node.name
    assert (answer.jobs, answer.sessions) == (1, 7)
    assert answer.token.uid == node.context.mirror.uid
    replicas = {r.replica: r for r in answer.replicas}
    assert set(replicas) == {"r1", "r2", "r3"}
    assert [name for name, r in replicas.items() if r.leader] == [leader.name]
    silent = {name for name, r in replicas.items() if r.not_ready_reason == NOT_RECEIVED}
    assert silent == set(replicas) - {leader.name, node.name}
    assert replicas[node.name].ready
    assert replicas[node.name].address == f"{node.name}:50051"


@in_cluster(Cluster.leader, idle=True)
async def test_a_viewer_limited_to_jobs_gets_the_status_even_with_a_newer_token(
    f: Cluster,
    node: Node,
) -> None:
    limited = Identity(cluster="default", role=Role.VIEWER, id="v", jobs=frozenset({"x"}))
    ahead = Token(uid=node.context.mirror.uid, revision=10**9)
    answer = await requested(node).answer("get_status", GetStatusRequest(token=ahead), NO_SESSION, limited)
    assert (answer.jobs, answer.answered_by) == (0, node.name)


@in_virtual_time()
async def test_an_http_resource_is_served_over_grpc_up_to_the_size_limit() -> None:
    async def read(path: str, identity: Identity | None) -> bytes:
        assert identity is None
        return b"x" * int(path.strip("/"))

    async def get(calls: Calls, path: str) -> bytes:
        answer = await calls.answer("get_resource", GetResourceRequest(path=path), NO_SESSION)
        json: bytes = answer.json
        return json

    async with cluster(idle=True) as f:
        node = await f.leader()
        with pytest.raises(Unavailable, match="this replica serves no resources"):
            await get(requested(node), "/jobs")
        assert len(await get(requested(node, read=read), "/200000")) == 200_000
        with pytest.raises(QuotaExceeded, match="300000 bytes"):
            await get(requested(node, read=read), "/300000")


@in_virtual_time()
async def test_an_etcd_that_fills_up_is_warned_of_once_a_minute() -> None:
    sizes = {"bytes": 69}

    def members() -> Sequence[EtcdMember]:
        return [EtcdMember(endpoint="a", db_size_bytes=n) for n in (10, sizes["bytes"])]

    async with rig() as r, asyncio.TaskGroup() as tasks:
        compaction = Compaction(store=r.client, mirror=r.mirror, quota_bytes=100, members=members)
        with capture_logs() as logs:
            driving = tasks.create_task(drive(compaction, r.mirror))
            await asyncio.sleep(100)
            assert [e for e in logs if e["event"] == "etcd_fills_up"] == []
            sizes["bytes"] = 70
            await asyncio.sleep(180)
        warnings = [e for e in logs if e["event"] == "etcd_fills_up"]
        assert len(warnings) == 3
        assert (warnings[0]["percent"], warnings[0]["log_level"]) == (70, "warning")
        driving.cancel()
