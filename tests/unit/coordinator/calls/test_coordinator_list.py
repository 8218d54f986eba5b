"""A departed coordinator: how the others list it, and how an operator removes it from the list."""

from __future__ import annotations

import asyncio

import pytest

from strata.coordinator.calls.admin import AdminCalls
from strata.coordinator.calls.table import NO_SESSION, Calls
from strata.core.access.authority import Identity, Role
from strata.core.leadership.coordinators import Coordinator
from strata.errors import NotFound, PermissionDenied, Refused
from strata.v1.admin_pb2 import ForgetCoordinatorRequest, GetStatusRequest, ReplicaStatus
from tests.unit.coordinator.rig import in_rig
from tests.unit.coordinator.serving_rig import KEYS, Cluster, Node, cluster


def requested(node: Node) -> Calls:
    calls = AdminCalls(node.context, None, peer_ready=lambda _instance: True, sessions=lambda: 0)
    return Calls(node.context.mirror, calls.rows(), cluster="default")


async def status(node: Node) -> dict[str, ReplicaStatus]:
    answer = await requested(node).answer("get_status", GetStatusRequest(), NO_SESSION)
    return {each.replica: each for each in answer.replicas}


async def forget(node: Node, name: str, identity: Identity | None = NO_SESSION) -> None:
    await requested(node).answer("forget_coordinator", ForgetCoordinatorRequest(replica=name), None, identity)


async def listed(node: Node, name: str) -> None:
    await node.see(lambda view: view.get(KEYS.coordinator(name)) is not None)


@in_rig(cluster, idle=True)
async def test_a_lost_coordinator_stays_unreachable_until_it_returns(f: Cluster) -> None:
    leader, lost = await f.leader(), await f.follower()
    (other,) = (node for node in f.alive if node not in (leader, lost))
    await listed(other, lost.name)
    await lost.crash()
    await other.see(lambda view: view.get(KEYS.replica(lost.name)) is None)
    await asyncio.sleep(14)
    found = (await status(other))[lost.name]
    assert (found.unreachable, found.ready, found.address) == (True, False, f"{lost.name}:50051")
    assert found.not_ready_reason == "unreachable for 14 s"
    assert found.unreachable_since_unix_ms > 0
    again = f.add(lost.name)
    await again.see(lambda view: view.get(KEYS.replica(lost.name)) is not None)
    await asyncio.sleep(1)
    assert not (await status(other))[lost.name].unreachable
    record = other.context.mirror.view.record(KEYS.coordinator(lost.name), Coordinator)
    assert record is not None
    assert record.unreachable_since_unix_ms == 0


@in_rig(cluster, idle=True)
async def test_a_stopped_leader_stays_listed_as_unreachable(f: Cluster) -> None:
    leader = await f.leader()
    for node in f.all:
        await listed(leader, node.name)
    await leader.stop()
    stays = await f.leader()
    await asyncio.sleep(5)
    found = await status(stays)
    assert set(found) == {"r1", "r2", "r3"}
    assert [name for name, each in found.items() if each.unreachable] == [leader.name]
    assert found[leader.name].not_ready_reason.startswith("unreachable for ")


@in_rig(cluster, idle=True)
async def test_an_operator_can_forget_a_lost_coordinator_and_no_other(f: Cluster) -> None:
    leader, lost = await f.leader(), await f.follower()
    await listed(leader, lost.name)
    with pytest.raises(Refused, match=f"coordinator {lost.name} runs at"):
        await forget(leader, lost.name)
    with pytest.raises(NotFound, match="no coordinator is called r9"):
        await forget(leader, "r9")
    await lost.crash()
    await leader.see(lambda view: view.get(KEYS.replica(lost.name)) is None)
    viewer = Identity(cluster="default", role=Role.VIEWER, id="v")
    limited = Identity(cluster="default", role=Role.OPERATOR, id="o", jobs=frozenset({"j"}))
    for may_not in (viewer, limited):
        with pytest.raises(PermissionDenied):
            await forget(leader, lost.name, may_not)
    await forget(leader, lost.name, Identity(cluster="default", role=Role.OPERATOR, id="o"))
    await asyncio.sleep(40)
    assert lost.name not in await status(leader)
