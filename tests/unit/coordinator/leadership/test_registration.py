"""A replica's own key. While the key is missing, the leader counts the replica's members as orphans."""

from __future__ import annotations

import asyncio

import pytest

from strata.coordinator.view import floors
from strata.core.ids import ReplicaId
from strata.core.kv.txn import KeyValue, Range, WatchBatch
from strata.errors import Unavailable
from strata.testing.network import Call, Fate, PromptNetwork
from strata.testing.virtual_time import in_virtual_time
from tests.not_none import not_none
from tests.unit.coordinator.rig import in_rig, now
from tests.unit.coordinator.serving_rig import KEYS, Cluster, cluster


class SlowKeepAlive(PromptNetwork):
    """Delay the registration's renewals that are under way while `slow` is set, and the watch by `watch_s`."""

    def __init__(self) -> None:
        self.slow = 0
        self.watch_s = 0.0
        self.lost_grants = 0

    def fate(self, call: Call) -> Fate:
        if call.kind == "grant" and self.lost_grants:
            self.lost_grants -= 1
            return Fate(lost="request")
        if call.kind == "keep_alive" and self.slow:
            self.slow -= 1
            return Fate(delay_s=4.0)
        return Fate()

    def watch_delay_s(self, client: str, batch: WatchBatch) -> float:
        return self.watch_s


def own_key(c: Cluster, name: str) -> KeyValue | None:
    found = c.store.read(Range(key=KEYS.replica(ReplicaId(name)))).kvs
    return found[0] if found else None


@in_virtual_time()
async def test_one_renewal_without_an_answer_loses_no_registration() -> None:
    network = SlowKeepAlive()
    async with cluster(1) as c:
        await c.start("r2", network=network)
        before = not_none(own_key(c, "r2"))
        await asyncio.sleep(3.5)
        network.slow = 1
        await asyncio.sleep(10)
        assert not network.slow
        assert own_key(c, "r2") == before


@in_virtual_time()
async def test_a_lost_registration_is_recreated_once_despite_a_late_watch() -> None:
    """A frozen etcd member delays the registration and the watch.

    Meanwhile the leader must not count this replica's members as orphans.
    """
    network = SlowKeepAlive()
    async with cluster(1, members=1) as c:
        await c.start("r2", network=network)
        member = await c.member("w0").connect("r2")
        lost = not_none(own_key(c, "r2"))
        network.watch_s, network.lost_grants = 12.0, 1
        c.store.revoke(lost.lease)
        await asyncio.sleep(3)
        again = not_none(own_key(c, "r2"))
        assert again.create_revision > lost.create_revision
        await member.connect((await member.next("moved")).addresses[0])  # at a replica whose view is not late
        await asyncio.sleep(20)
        network.watch_s = 0.0
        assert own_key(c, "r2") == again, "the late view is no reason to register once more"
        assert not_none(c.worker("w0")).create_revision == member.incarnation
        await asyncio.sleep(12)


@in_virtual_time()
async def test_a_member_ahead_of_a_late_view_is_refused_in_time_to_go_elsewhere() -> None:
    """A member whose replica died has five seconds once the leader sees it as an orphan (PROTOCOLS 5.4)."""
    network = SlowKeepAlive()
    async with cluster(1) as c:
        await c.start("r2", network=network)
        network.watch_s = 12.0
        c.put(KEYS.job("other").phase, b"{}")
        await c["r1"].context.mirror.fresh()
        began = now()
        with pytest.raises(Unavailable, match="this replica is at revision"):
            await floors.honour(c["r2"].context.mirror, floors.token(c["r1"].context.mirror))
        assert now() - began < 1.5
        network.watch_s = 0.0
        c.delete(KEYS.job("other").phase)
        await asyncio.sleep(12)


@in_rig(cluster, 2)
async def test_a_member_at_a_cut_off_replica_is_redirected_in_time(c: Cluster) -> None:
    """A member of a dead replica may come to one that reaches neither etcd nor a peer (PROTOCOLS 5.4)."""
    cut = c["r2"]
    cut.client.partition()
    c.partition("r1", "r2")
    began = now()
    member = c.member("w0")
    member.dial("r2")
    moved = await member.next("moved")
    assert "etcd has not answered" in moved.reason
    assert now() - began < 4
    await member.connect("r1")
    await asyncio.sleep(2)
    c.heal("r1", "r2")
    cut.client.heal()
    await c.ready()
    assert not_none(c.worker("w0")).create_revision == member.incarnation
