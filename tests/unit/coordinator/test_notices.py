"""The leader's clock over notices: what nobody heeds ends a while after its grace, under any leader."""

from __future__ import annotations

import asyncio

from strata.core.job import JobView
from strata.core.records import StopAction
from strata.core.stopping import GONE_S, LATE_S, StopRequest, decide_stop
from tests.not_none import not_none
from tests.unit.coordinator.rig import now
from tests.unit.coordinator.serving_rig import JOB, Cluster, Node, in_cluster

GRACE_S = 5.0


async def preempted(replicas: Cluster, node: Node) -> float:
    """Let two members train and be asked to leave, which they never do; return when they were asked."""
    for worker in ("w0", "w1"):
        await replicas.register(node, worker, min_workers=2, max_workers=2)
    await replicas.generation(node, 1)
    request = StopRequest(action=StopAction.PREEMPT, grace_ms=int(1000 * GRACE_S))
    await node.context.executor.settle(lambda view: decide_stop(JobView(view, JOB), request))
    return now()


@in_cluster(Cluster.follower, idle=True)
async def test_ranks_that_never_stop_are_stopped_and_members_that_never_leave_train_again(
    replicas: Cluster,
    node: Node,
) -> None:
    clock = asyncio.get_running_loop().time
    asked = await preempted(replicas, node)
    forming = await replicas.generation(node, 2)
    assert GRACE_S + LATE_S - 0.1 <= clock() - asked <= GRACE_S + LATE_S + 1
    head = not_none(forming.head())
    assert head.record.forming
    assert len(head.record.asked) == 1
    again = (await replicas.generation(node, 3)).head()
    assert GRACE_S + GONE_S - 0.1 <= clock() - asked <= GRACE_S + GONE_S + 1
    assert again is not None
    assert (again.record.members, again.record.asked) == (2, ())


@in_cluster(Cluster.follower, idle=True)
async def test_a_new_leader_counts_anew_and_so_only_later(replicas: Cluster, node: Node) -> None:
    clock = asyncio.get_running_loop().time
    asked = await preempted(replicas, node)
    await asyncio.sleep(20)
    leader = await replicas.leader()
    await leader.stop()
    successor = await replicas.leader()
    assert successor is not leader
    await replicas.generation(node, 2)
    assert GRACE_S + LATE_S + 19 <= clock() - asked <= GRACE_S + LATE_S + 30
