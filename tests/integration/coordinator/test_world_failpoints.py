"""The leader's process dies in the middle of a world change, at each of its transactions.

`tests/unit/coordinator/test_world_failpoints.py` covers every kind of change in virtual time. These tests use real
processes, a real etcd and SIGKILL.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from strata.core.invariants import check
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.txn import Range, prefix_end
from strata.core.kv.view import View
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.etcd import EtcdStore
from tests.integration.replicas import Replicas, started
from tests.raw_member import Member

PROGRAM = Path(__file__).with_name("failpoint_coordinator.py")
MEMBERS = 5
LEAST_BOUNDARIES = 3


async def keyspace(store: EtcdStore, keys: ClusterKeys, revision: int = 0) -> View:
    """Return the keyspace as of `revision`, or now."""
    found = await store.read(Range(key=keys.root, range_end=prefix_end(keys.root), revision=revision))
    view = View()
    view.reset(revision or found.revision, found.kvs)
    return view


def arm(point: Path, words: str) -> None:
    point.with_suffix(".fired").unlink(missing_ok=True)
    point.write_text(words)


def disarmed(point: Path) -> bool:
    """Disarm the failpoint; return True if a process died of it."""
    try:
        point.unlink()
    except FileNotFoundError:
        return True
    return False


async def changed_world(replicas: Replicas, store: EtcdStore, mode: str, number: int, point: Path) -> bool:
    """Fail a rank; the leader dies at its `number`-th write after the failure. Return False if it makes fewer writes.

    Assert in both cases that the job ends up in one world of all members.
    """
    keys = ClusterKeys(f"failpoints-{mode}")
    leader = await replicas.leader()
    others = [name for name in replicas.names if name != leader]
    replicas.job = f"{mode}-{number}"
    members = await replicas.world(*(others[n % 2] for n in range(MEMBERS)))
    before = (await keyspace(store, keys)).revision
    arm(point, f"{replicas.job} {number} {mode}")
    members[3].send(rank_exit={"id": 1, "generation": 1, "rank": 3, "code": 1})
    updates = [await member.world(2) for member in members]
    assert sorted(update.place.first_rank for update in updates) == [*range(MEMBERS)]
    assert {update.world.size for update in updates} == {MEMBERS}
    died = disarmed(point)
    if died:
        await asyncio.to_thread(replicas[leader].child.join)
        replicas[leader].start()
        await replicas.ready()
    await one_world(store, keys, replicas.job, before, members)
    for member in members:
        member.drop()
    return died


async def one_world(store: EtcdStore, keys: ClusterKeys, job: str, since: int, members: list[Member]) -> None:
    """Assert that the keyspace was sound at every revision, and that it now has one world of all members."""
    now = await keyspace(store, keys)
    for revision in range(since + 1, now.revision + 1):
        assert check(await keyspace(store, keys, revision), keys) == [], f"revision {revision}"
    found = JobView(now, keys.job(job))
    world = found.world()
    assert world is not None
    assert (world.head.generation, world.head.size) == (2, MEMBERS)
    assert {(m.worker, m.incarnation) for m in world.members} == {(m.worker, m.incarnation) for m in members}
    assert [int(entry.name) for entry in found.history()] == [1, 2]
    assert "failed" in world.head.reason


@pytest.mark.parametrize("mode", ["unsent", "unanswered"])
async def test_a_leader_that_is_killed_in_a_world_change_leaves_one_world(
    etcd: EtcdCluster, tmp_path: Path, mode: str
) -> None:
    point = tmp_path / "failpoint"
    store = await EtcdStore.connect(etcd.endpoints)
    async with (
        store,
        started(
            etcd, f"failpoints-{mode}", tmp_path, program=PROGRAM, env={"FAILPOINT": str(point)}
        ) as replicas,
    ):
        boundaries = 0
        while await changed_world(replicas, store, mode, boundaries + 1, point):
            boundaries += 1
        assert boundaries >= LEAST_BOUNDARIES
