"""A view that is behind etcd's answers: the mirror opens its watch elsewhere, and members move meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strata.coordinator.view.mirror import Mirror
from strata.testing.memory_store import MemoryStore
from strata.testing.network import Fate
from strata.testing.virtual_time import in_virtual_time
from tests.unit.coordinator.rig import KEYS, Scripted, now, put
from tests.unit.coordinator.serving_rig import cluster


@asynccontextmanager
async def followed() -> AsyncIterator[tuple[MemoryStore, Scripted, Mirror]]:
    """Run a mirror that knows of each revision at once; its network can delay the watch."""
    store, network = MemoryStore(), Scripted()
    mirror = Mirror(
        store.client("r1", network=network),
        KEYS,
        new_uid="uid-1",
        answered=lambda: store.state.head,
        ask_s=3600,
    )
    running = asyncio.create_task(mirror.run())
    await mirror.started()
    yield store, network, mirror
    running.cancel()


@in_virtual_time()
async def test_a_watch_that_is_behind_an_answered_revision_is_opened_again_after_two_seconds() -> None:
    async with followed() as (store, network, mirror):
        await asyncio.sleep(1)
        network.watch_s = 12.0
        revision = put(store, KEYS.root + "a")
        await asyncio.sleep(0.5)
        network.watch_s = 0.0
        began = now() - 0.5
        await mirror.wait_until(lambda view: view.revision >= revision)
        assert 2.0 < now() - began < 3.0
        await asyncio.sleep(0.5)
        assert mirror.behind_s() == 0


@in_virtual_time()
async def test_reopening_a_slow_watch_does_not_delay_the_view_without_end() -> None:
    async with followed() as (store, network, mirror):
        network.watch_s = 12.0
        revision = put(store, KEYS.root + "a")
        began = now()
        await mirror.wait_until(lambda view: view.revision >= revision)
        assert now() - began < 15.0


@in_virtual_time()
async def test_foreign_revisions_count_as_no_lag_and_cost_about_a_list_a_second() -> None:
    async with followed() as (store, network, mirror):
        put(store, KEYS.root + "a")
        await asyncio.sleep(1)
        network.begin()
        longest_s = 0.0
        for _ in range(300):
            put(store, "foreign")
            await asyncio.sleep(0.1)
            longest_s = max(longest_s, mirror.behind_s())
        assert longest_s < 2.0
        assert network.reads < 30


@in_virtual_time()
async def test_a_slow_read_that_proves_revisions_foreign_is_awaited() -> None:
    async with followed() as (store, network, mirror):
        await asyncio.sleep(1)
        network.says, longest_s = lambda _call: Fate(answer_delay_s=0.8), 0.0
        put(store, "foreign")
        for _ in range(100):
            await asyncio.sleep(0.1)
            longest_s = max(longest_s, mirror.behind_s())
        assert 1.0 <= longest_s < 2.0


@in_virtual_time()
async def test_a_replica_with_a_late_view_sends_its_members_to_one_that_knows_more() -> None:
    network = Scripted()
    async with cluster(2, members=1) as c:
        await c.start("r3", network=network)
        [member] = await c.world("r3")
        network.watch_s = 12.0
        put(c.store, c["r1"].context.keys.root + "news")
        began = now()
        moved = await member.next("moved")
        assert 2.0 < now() - began < 4.0
        assert c["r3"].replica.is_ready()[0] is False
        assert "behind" in c["r3"].replica.is_ready()[1]
        await member.connect(moved.addresses[0])
        network.watch_s = 0.0
        await asyncio.sleep(20)
        assert c["r3"].replica.is_ready()[0]
        c.delete(c["r1"].context.keys.root + "news")
        await asyncio.sleep(1)
