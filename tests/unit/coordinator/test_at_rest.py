"""What a cluster in which nothing happens asks of etcd. Renewals are no writes: they wait for no disk."""

from __future__ import annotations

import asyncio
from collections import Counter

from strata.core.txn import Txn
from strata.testing.network import Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time
from tests.unit.coordinator.serving_rig import cluster

MEMBERS = 100
WRITES_A_MINUTE = 60
MINUTES = 2


class Counting(PromptNetwork):
    """Counts the calls by kind."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def fate(self, call: Call) -> Fate:
        kind = call.kind
        if isinstance(call.argument, Txn) and not (call.argument.success or call.argument.failure):
            return Fate()
        self.calls[kind] += 1
        return Fate()

    @property
    def writes(self) -> int:
        return sum(self.calls[kind] for kind in ("execute", "grant", "revoke", "compact"))


@in_virtual_time()
async def test_three_replicas_and_a_hundred_idle_members_write_next_to_nothing() -> None:
    network = Counting()
    async with cluster(0, members=MEMBERS) as c:
        for name in ("r1", "r2", "r3"):
            c.add(name, network=network)
        await c.ready()
        members = await c.world(*(f"r{1 + number % 3}" for number in range(MEMBERS)))
        await asyncio.sleep(10)
        network.calls.clear()
        await asyncio.sleep(60 * MINUTES)
        assert network.writes <= WRITES_A_MINUTE * MINUTES / 10, network.calls
        assert 4 * 55 * MINUTES < network.calls["keep_alive"] < 4 * 65 * MINUTES
        # The leader looks once a second, beside its renewal, whether its own key is still there (PROTOCOLS 4.3).
        assert network.calls["read"] < 75 * MINUTES, network.calls
        assert not any(member.over.is_set() for member in members)
