"""A view that is behind what etcd has answered: the watch is opened elsewhere, members go meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strata.coordinator.leadership.election import Election
from strata.coordinator.leadership.heartbeat import Heartbeat
from strata.coordinator.measures import Measures
from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.measured import MeasuredStore
from strata.core.ids import Epoch, InstanceId, ReplicaId
from strata.core.leadership import resign_txn
from strata.core.txn import WatchBatch
from strata.errors import Unavailable
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time
from tests.unit.coordinator.rig import KEYS, now, put, rig
from tests.unit.coordinator.serving_rig import cluster


class Frozen(PromptNetwork):
    """Its watch, as long as it is the one that `freeze` met, tells nothing for 12 s."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.answer_s = 0.0
        self.reads = 0
        self.loses_reads = False

    def fate(self, call: Call) -> Fate:
        self.reads += call.kind == "read"
        lost = self.loses_reads and call.kind == "read"
        return Fate(answer_delay_s=self.answer_s, lost="request" if lost else None)

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        return self.delay_s


class Losing(MeasuredStore):
    """It opens no watch for as long as it is told so."""

    is_losing = False

    @asynccontextmanager
    async def watch(
        self, key: str, range_end: str | None, *, start_revision: int
    ) -> AsyncIterator[AsyncIterator[WatchBatch]]:
        async with super().watch(key, range_end, start_revision=start_revision) as batches:
            yield Lost() if self.is_losing else batches


class Lost:
    """A watch that breaks at once."""

    def __aiter__(self) -> Lost:
        return self

    async def __anext__(self) -> WatchBatch:
        raise Unavailable("no watch today")


async def followed(
    store: MemoryStore, network: Frozen, tasks: asyncio.TaskGroup
) -> tuple[Mirror, asyncio.Task[None]]:
    mirror = Mirror(
        store.client("r1", network=network), KEYS, new_uid="uid-1", answered=lambda: store.state.head
    )
    running = tasks.create_task(mirror.run())
    await mirror.started()
    return mirror, running


@in_virtual_time()
async def test_a_watch_that_is_behind_an_answered_revision_is_opened_again_after_two_seconds() -> None:
    store, network = MemoryStore(), Frozen()
    async with asyncio.TaskGroup() as tasks:
        mirror, running = await followed(store, network, tasks)
        await asyncio.sleep(1)
        network.delay_s = 12.0
        revision = put(store, KEYS.root + "a")
        await asyncio.sleep(0.5)
        network.delay_s = 0.0
        began = now() - 0.5
        await mirror.wait_until(lambda view: view.revision >= revision)
        assert 2.0 < now() - began < 3.0
        await asyncio.sleep(0.5)
        assert mirror.behind_s() == 0
        running.cancel()


@in_virtual_time()
async def test_opening_it_again_does_not_make_a_slow_watch_later_for_ever() -> None:
    store, network = MemoryStore(), Frozen()
    async with asyncio.TaskGroup() as tasks:
        mirror, running = await followed(store, network, tasks)
        network.delay_s = 12.0
        revision = put(store, KEYS.root + "a")
        began = now()
        await mirror.wait_until(lambda view: view.revision >= revision)
        assert now() - began < 15.0
        running.cancel()


@in_virtual_time()
async def test_revisions_of_others_are_no_lag_and_cost_about_a_list_a_second() -> None:
    store, network = MemoryStore(), Frozen()
    async with asyncio.TaskGroup() as tasks:
        mirror, running = await followed(store, network, tasks)
        put(store, KEYS.root + "a")
        await asyncio.sleep(1)
        network.reads, longest_s = 0, 0.0
        for _ in range(300):
            put(store, "foreign")
            await asyncio.sleep(0.1)
            longest_s = max(longest_s, mirror.behind_s())
        assert longest_s < 2.0
        assert network.reads < 30
        running.cancel()


@in_virtual_time()
async def test_a_slow_proof_that_revisions_are_of_others_is_waited_for() -> None:
    store, network = MemoryStore(), Frozen()
    async with asyncio.TaskGroup() as tasks:
        mirror, running = await followed(store, network, tasks)
        await asyncio.sleep(1)
        network.answer_s, longest_s = 0.8, 0.0
        put(store, "foreign")
        for _ in range(100):
            await asyncio.sleep(0.1)
            longest_s = max(longest_s, mirror.behind_s())
        assert 1.0 <= longest_s < 2.0
        running.cancel()


@in_virtual_time()
async def test_a_mirror_that_is_behind_while_it_waits_to_open_its_lost_watch_goes_on(
    store: MemoryStore,
) -> None:
    losing = Losing(store.client("r1"), Measures())
    async with asyncio.TaskGroup() as tasks:
        mirror = Mirror(losing, KEYS, new_uid="uid-1", answered=lambda: store.state.head)
        running = tasks.create_task(mirror.run())
        await mirror.started()
        losing.is_losing = True
        mirror._end_watch()
        await asyncio.sleep(0.1)
        revision = put(store, KEYS.root + "a")
        await asyncio.sleep(60)
        assert mirror.behind_s() > 2.0
        losing.is_losing = False
        async with asyncio.timeout(1.0):
            await mirror.wait_until(lambda view: view.revision >= revision)
        running.cancel()


@in_virtual_time()
async def test_a_replica_with_a_late_view_sends_its_members_to_one_that_knows_more() -> None:
    network = Frozen()
    async with cluster(2, members=1) as c:
        await c.start("r3", network=network)
        [member] = await c.world("r3")
        network.delay_s = 12.0
        put(c.store, c["r1"].context.keys.root + "news")
        began = now()
        moved = await member.next("moved")
        assert 2.0 < now() - began < 4.0
        assert c["r3"].replica.is_ready()[0] is False
        assert "behind" in c["r3"].replica.is_ready()[1]
        await member.connect(moved.addresses[0])
        network.delay_s = 0.0
        await asyncio.sleep(20)
        assert c["r3"].replica.is_ready()[0]
        c.delete(c["r1"].context.keys.root + "news")
        await asyncio.sleep(1)


@asynccontextmanager
async def leading(store: MemoryStore, network: Frozen) -> AsyncIterator[tuple[Election, Epoch]]:
    """Run an election whose world controller turns, in office for some seconds."""
    async with rig(store, network=network) as r, asyncio.TaskGroup() as tasks:
        heartbeat = Heartbeat(now)
        election = Election(
            renewals=r.client,
            mirror=r.mirror,
            executor=r.executor,
            keys=KEYS,
            instance=InstanceId("instance-r1"),
            replica=ReplicaId("r1"),
            heartbeat=heartbeat,
            clock=now,
        )
        with heartbeat.waiting():
            running = tasks.create_task(election.run(address="r1:1"))
            epoch = await election.elected()
            await asyncio.sleep(5)
            assert election.epoch == epoch
            yield election, epoch
            running.cancel()


@in_virtual_time()
async def test_a_leader_whose_late_view_hides_that_its_key_went_stops_by_its_next_renewal() -> None:
    store, network = MemoryStore(), Frozen()
    async with leading(store, network) as (election, epoch):
        network.delay_s = 12.0
        store.execute(resign_txn(KEYS, epoch))  # as a follower that deposes it; its lease lives on
        async with asyncio.timeout(1.5):
            await election.ended(epoch)


@in_virtual_time()
async def test_a_renewal_counts_only_if_the_key_was_seen_after_it() -> None:
    store, network = MemoryStore(), Frozen()
    async with leading(store, network) as (election, epoch):
        network.delay_s, network.loses_reads = 12.0, True
        store.execute(resign_txn(KEYS, epoch))
        async with asyncio.timeout(4.1):  # two thirds of the lease
            await election.ended(epoch)
