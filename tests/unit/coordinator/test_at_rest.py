"""The etcd requests of a cluster at rest. Renewals are no writes: they wait for no disk."""

from __future__ import annotations

import asyncio
from collections import Counter

from strata.core.kv.txn import Txn
from tests.unit.coordinator.rig import Scripted, in_rig
from tests.unit.coordinator.serving_rig import Cluster, cluster

MEMBERS = 100
WRITES_A_MINUTE = 60
MINUTES = 2


@in_rig(cluster, 0, members=MEMBERS)
async def test_three_replicas_and_a_hundred_idle_members_write_next_to_nothing(c: Cluster) -> None:
    network = Scripted()
    await c.start(*("r1", "r2", "r3"), network=network)
    members = await c.world(*(f"r{1 + number % 3}" for number in range(MEMBERS)))
    await asyncio.sleep(10)
    network.begin()
    await asyncio.sleep(60 * MINUTES)
    nothing = Txn()
    calls = Counter(call.kind for call in network.calls if call.argument != nothing)
    written = sum(calls[kind] for kind in ("execute", "grant", "revoke", "compact"))
    assert written <= WRITES_A_MINUTE * MINUTES / 10, calls
    assert 4 * 55 * MINUTES < calls["keep_alive"] < 4 * 65 * MINUTES
    # The leader reads its own key once a second, beside its renewal (PROTOCOLS 4.3). Each replica checks every two
    # seconds that etcd is still the same cluster (9.1).
    assert calls["read"] < (75 + 3 * 31) * MINUTES, calls
    assert not any(member.over.is_set() for member in members)
