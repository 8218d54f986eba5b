"""Leadership, fence and view on a real etcd with real timing. Tests in virtual time cover the same rules."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from strata.coordinator.leadership.controller_watchdog import ControllerWatchdog
from strata.coordinator.leadership.election import Election
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.coordinator.writes.fence import Fence
from strata.core.ids import Epoch, InstanceId, ReplicaId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.txn import Delete, KeyValue, Put, Range, RangeResult, Txn, read_prefix
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.errors import NotLeader
from strata.etcd import EtcdStore
from tests.etcd_fixtures import StartEtcd

LIMIT_S = 30.0


class Candidate:
    """The parts of a replica that take part in an election; its world controller always counts as running."""

    def __init__(self, store: EtcdStore, keys: ClusterKeys, name: str) -> None:
        self.store = store
        self.keys = keys
        self.mirror = Mirror(store, keys, new_uid=uuid.uuid4().hex)
        self.executor = Executor(store, self.mirror)
        self.heartbeat = ControllerWatchdog(time.monotonic)
        self.election = Election(
            renewals=store,
            mirror=self.mirror,
            executor=self.executor,
            keys=keys,
            instance=InstanceId(uuid.uuid4().hex),
            replica=ReplicaId(name),
            heartbeat=self.heartbeat,
            clock=time.monotonic,
        )
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        with self.heartbeat.waiting():  # counts as running
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.mirror.run())
                tasks.create_task(self.executor.run())
                tasks.create_task(self.election.run(address="nowhere:1"))

    async def die(self) -> None:
        """End without resigning, like a killed process."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.store.close()

    def fence(self, epoch: Epoch) -> Fence:
        return Fence(store=self.store, mirror=self.mirror, keys=self.keys, term=self.election, epoch=epoch)


@asynccontextmanager
async def candidates(etcd: EtcdCluster, count: int) -> AsyncIterator[list[Candidate]]:
    keys = ClusterKeys(f"election-{uuid.uuid4().hex}")
    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
        stores = [
            await stack.enter_async_context(await EtcdStore.connect(etcd.endpoints)) for _ in range(count)
        ]
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        made = [Candidate(store, keys, f"r{n}") for n, store in enumerate(stores, 1)]
        for candidate in made:
            candidate.task = tasks.create_task(candidate.run())
            await candidate.mirror.started()
        yield made
        for candidate in made:
            assert candidate.task is not None
            candidate.task.cancel()


async def elected(candidates: list[Candidate]) -> tuple[Candidate, Epoch]:
    """Return the first candidate that leads, and its epoch."""
    waiting = {asyncio.ensure_future(c.election.elected()): c for c in candidates}
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    task = done.pop()
    return waiting[task], task.result()


async def test_a_dead_leader_is_succeeded_when_its_lease_ends(etcd: EtcdCluster) -> None:
    async with candidates(etcd, 3) as three:
        leader, epoch = await elected(three)
        others = [c for c in three if c is not leader]
        assert all(c.election.epoch is None for c in others)
        died_at = time.monotonic()
        await leader.die()
        _, later = await elected(others)
        assert later > epoch
        assert 3 < time.monotonic() - died_at < 12


async def test_a_leader_that_resigns_is_succeeded_at_once(etcd: EtcdCluster) -> None:
    async with candidates(etcd, 2) as both:
        leader, epoch = await elected(both)
        (other,) = (c for c in both if c is not leader)
        began = time.monotonic()
        # its campaign goes on, so it may win again; the test requires only a new epoch soon
        await leader.election.resign()
        _, later = await elected(both)
        assert later > epoch
        assert time.monotonic() - began < 3
        assert (other.election.epoch is None) is (leader.election.epoch is not None)


async def test_writes_of_a_deposed_leader_fail_in_etcd_itself(etcd: EtcdCluster) -> None:
    async with candidates(etcd, 1) as (only,):
        epoch = await only.election.elected()
        fence, key = only.fence(epoch), only.keys.root + "jobs/x"
        assert (await fence.execute(Txn(success=(Put(key=key, value=b"1"),)))).succeeded
        await only.store.execute(Txn(success=(Delete(key=only.keys.leader),)))
        # the same write, with a term that never ends: only the compare in etcd can reject this write
        late = Fence(
            store=only.store,
            mirror=only.mirror,
            keys=only.keys,
            term=Believer(epoch),
            epoch=epoch,
        )
        with pytest.raises(NotLeader):
            await late.execute(Txn(success=(Put(key=key, value=b"2"),)))
        assert (await only.store.read(Range(key=key))).kvs[0].value == b"1"
        assert await only.election.elected() > epoch


class Believer:
    """A leader's term that never ends."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch: Epoch | None = epoch

    def deposed(self, epoch: Epoch, reason: str) -> None:
        pass


async def test_the_leader_keeps_leading_when_etcd_loses_its_leader(etcd_cluster: EtcdCluster) -> None:
    async with candidates(etcd_cluster, 3) as three:
        leader, _ = await elected(three)
        member = await asyncio.to_thread(etcd_cluster.leader)
        await asyncio.to_thread(member.kill)
        key = leader.keys.root + "jobs/x"
        for number in range(20):
            await fenced_put(three, key, b"%d" % number)
        for candidate in three:
            await candidate.mirror.fresh()
            kv = candidate.mirror.view.get(key)
            assert kv is not None
            assert kv.value == b"19"
        assert len([c for c in three if c.election.epoch]) == 1


async def fenced_put(candidates: list[Candidate], key: str, value: bytes) -> None:
    """Write as the current leader, which may change on a busy machine until etcd has a leader again."""
    while True:
        leader, epoch = await elected(candidates)
        with contextlib.suppress(NotLeader):
            await leader.fence(epoch).execute(Txn(success=(Put(key=key, value=value),)))
            return


# -- the view ---------------------------------------------------------------------------------


class Held(EtcdStore):
    """A store that holds back the answer to a list until `release` is set."""

    release: asyncio.Event
    listed: asyncio.Event

    async def read(self, request: Range) -> RangeResult:
        answer = await super().read(request)
        if request.range_end is not None and not request.keys_only:
            self.listed.set()
            await self.release.wait()
        return answer


def contents(kvs: tuple[KeyValue, ...]) -> dict[str, tuple[bytes, int]]:
    return {kv.key: (kv.value, kv.mod_revision) for kv in kvs}


async def test_a_view_catches_up_after_a_compaction(start_etcd: StartEtcd) -> None:
    """The listed revision is compacted before the watch begins, so the view must list again."""
    etcd = start_etcd(1)
    keys = ClusterKeys("compaction")
    async with (
        asyncio.timeout(LIMIT_S),
        await Held.connect(etcd.endpoints) as held,
        await EtcdStore.connect(etcd.endpoints) as store,
        asyncio.TaskGroup() as tasks,
    ):
        held.release, held.listed = asyncio.Event(), asyncio.Event()
        await store.execute(Txn(success=(Put(key=keys.root + "gone", value=b"1"),)))
        mirror = Mirror(held, keys, new_uid="uid")
        running = tasks.create_task(mirror.run())
        await held.listed.wait()
        await store.execute(Txn(success=(Delete(key=keys.root + "gone"),)))
        last = await store.execute(Txn(success=(Put(key=keys.root + "new", value=b"2"),)))
        await store.compact(last.revision)
        held.release.set()
        await mirror.started()
        await mirror.fresh()
        there = await store.read(read_prefix(keys.root))
        assert contents(tuple(mirror.view.walk(keys.root))) == contents(there.kvs)
        assert mirror.differences == 0
        running.cancel()


async def test_foreign_revisions_in_the_same_etcd_do_not_delay_a_fresh_read(
    etcd: EtcdCluster,
) -> None:
    async with candidates(etcd, 1) as (only,):
        for number in range(20):
            foreign = Put(key=f"/elsewhere/{uuid.uuid4().hex}", value=b"%d" % number)
            await only.store.execute(Txn(success=(foreign,)))
        began = time.monotonic()
        await only.mirror.fresh()
        assert time.monotonic() - began < 3, "etcd tells of them only every 5 s"
