"""A replica is lost together with more members than one transaction deletes."""

from __future__ import annotations

import asyncio

import pytest

from strata.coordinator.controllers.housekeeping import ATTEMPT_S
from strata.core.job import JobView
from strata.core.kv.records import Phase
from strata.core.kv.txn import Delete, Put, Txn
from strata.core.kv.view import View
from strata.etcd import Timing
from strata.testing.network import Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time
from strata.v1 import worlds_pb2
from tests.not_none import not_none
from tests.raw_member import Member
from tests.unit.coordinator.rig import in_rig
from tests.unit.coordinator.serving_rig import JOB, Cluster, cluster

SURVIVORS = 30


class Slow(PromptNetwork):
    """A network with a millisecond each way, apart from the delays and losses that a test sets."""

    def __init__(self) -> None:
        self.deletions = 0
        self.lost_from = 1 << 30
        self.answer_s = 0.001
        """Delay in seconds of the answers to deletions."""
        self.late = 0
        """Number of the deletion that is delayed on its way; 0: none."""
        self.put_s = 0.001
        """Delay in seconds of the writes of members' keys."""
        self.deleting = asyncio.Event()

    def fate(self, call: Call) -> Fate:
        operations = call.argument.success if isinstance(call.argument, Txn) else ()
        members = [o for o in operations if isinstance(o, Delete | Put) and o.key.startswith(JOB.workers)]
        if any(isinstance(o, Put) for o in members):
            return Fate(delay_s=self.put_s)
        if not members:
            return Fate(delay_s=0.001, answer_delay_s=0.001)
        self.deletions += 1
        if self.deletions >= self.lost_from:
            self.deleting.set()
            return Fate(lost="request")
        if self.deletions == self.late:
            self.deleting.set()
            return Fate(delay_s=0.3)
        if self.answer_s > 0.1:
            self.deleting.set()
        return Fate(delay_s=0.001, answer_delay_s=self.answer_s)


async def trained(c: Cluster, dead: int, network: Slow) -> list[Member]:
    """Return the members of one world, some at `r1`, which leads, and `dead` of them at `r2`."""
    await c.start("r1", network=network)
    await c.start("r2", network=Slow())
    spec = worlds_pb2.JobSpec(min_workers=1, max_workers=c.members, settle_s=3.0)
    members = [
        await c.member(f"w{i:04}").connect("r1" if i < SURVIVORS else "r2", spec=spec)
        for i in range(SURVIVORS + dead)
    ]
    await members[0].world()
    await asyncio.sleep(5)
    return members


def left(view: View) -> int:
    return len(list(JobView(view, JOB).workers()))


@pytest.mark.parametrize(("dead", "answer_s"), [(61, 0.001), (200, 0.001), (400, 0.25)])
@in_virtual_time()
async def test_many_orphans_end_one_generation_and_not_the_job(dead: int, answer_s: float) -> None:
    """If each group of thirty ended a generation, three such generations without a checkpoint would fail the job."""
    async with cluster(0, members=SURVIVORS + dead) as c:
        network = Slow()
        members = await trained(c, dead, network)
        network.answer_s = answer_s
        before = not_none(JobView(c["r1"].view, JOB).head())
        c["r2"].kill()
        for member in members[SURVIVORS:]:
            member.drop()
        await c["r1"].see(lambda view: left(view) == SURVIVORS)
        await asyncio.sleep(3)
        after = not_none(JobView(c["r1"].view, JOB).head())
        assert after.record.generation == before.record.generation + 1
        assert after.record.size == SURVIVORS
        assert JobView(c["r1"].view, JOB).phase() is Phase.RUNNING


@in_rig(cluster, 0, members=SURVIVORS + 60)
async def test_a_member_that_reconnects_between_two_deletions_is_not_deleted(c: Cluster) -> None:
    network = Slow()
    members = await trained(c, 60, network)
    late = members[-1]
    before = late.incarnation
    c["r2"].kill()
    for member in members[SURVIVORS:]:
        member.drop()
    network.answer_s, network.put_s = 0.8, 4.0
    await network.deleting.wait()
    await asyncio.sleep(0.1)
    assert left(c["r1"].view) == SURVIVORS + 30
    late.dial("r1")
    network.answer_s = 0.001
    await c["r1"].see(lambda view: left(view) <= SURVIVORS + 1)
    network.put_s = 0.001
    await late.next("welcome")
    assert not_none(c.worker(late.worker)).create_revision == before


@in_rig(cluster, 0, members=SURVIVORS + 60)
async def test_no_world_is_written_while_the_last_group_deletion_is_retried(c: Cluster) -> None:
    """A member returned just before its deletion, so this transaction failed.

    The other members must still be deleted.
    """
    network = Slow()
    members = await trained(c, 60, network)
    network.late = 2
    before = not_none(JobView(c["r1"].view, JOB).head())
    c["r2"].kill()
    for member in members[SURVIVORS:]:
        member.drop()
    await network.deleting.wait()
    members[-1].dial("r1")
    await c["r1"].see(lambda view: left(view) == SURVIVORS + 1)
    await asyncio.sleep(5)
    after = not_none(JobView(c["r1"].view, JOB).head())
    assert after.record.generation == before.record.generation + 1
    assert after.record.size == SURVIVORS + 1


@in_rig(cluster, 0, members=SURVIVORS + 60)
async def test_a_world_does_not_wait_forever_for_members_that_cannot_be_deleted(c: Cluster) -> None:
    network = Slow()
    network.lost_from = 2
    members = await trained(c, 60, network)
    before = not_none(JobView(c["r1"].view, JOB).head())
    c["r2"].kill()
    for member in members[SURVIVORS:]:
        member.drop()
    await network.deleting.wait()
    await asyncio.sleep(8)
    assert not_none(JobView(c["r1"].view, JOB).head()).record.generation > before.record.generation


def test_an_attempt_outlasts_a_request_to_one_etcd_member() -> None:
    """A caller that gave up earlier would not blame the frozen etcd member, and would call the same member again."""
    assert Timing().request_s < ATTEMPT_S
