"""A replica detects that etcd takes no writes.

It must not move a member to another replica, and must not delete one.
"""

from __future__ import annotations

import asyncio

import pytest

from strata.core.kv.store import NoSpace
from strata.core.kv.txn import Put, Txn
from strata.errors import Unavailable
from strata.testing.memory_client import MemoryClient
from tests.unit.coordinator.serving_rig import Cluster, Member, in_cluster, in_world

THREE = ("r1", "r2", "r3")


class Full:
    """A quota of etcd that is used up for all of its clients: puts and grants fail, deletes pass."""

    def __init__(self, c: Cluster) -> None:
        self.on = False
        for name in THREE:
            self._limit(c[name].client)

    def _limit(self, client: MemoryClient) -> None:
        execute, grant = client.execute, client.grant

        async def limited(txn: Txn) -> object:
            await self._check(any(isinstance(op, Put) for op in (*txn.success, *txn.failure)))
            return await execute(txn)

        async def limited_grant(ttl_s: int) -> object:
            await self._check(True)
            return await grant(ttl_s)

        client.execute, client.grant = limited, limited_grant  # type: ignore[method-assign,assignment]  # a fault

    async def _check(self, writes: bool) -> None:
        await asyncio.sleep(0.001)
        if writes and self.on:
            raise NoSpace("etcd e1: etcdserver: mvcc: database space exceeded")


@in_world(*THREE)
async def test_a_full_etcd_leaves_replicas_ready_and_removes_no_member(
    c: Cluster, members: list[Member]
) -> None:
    full = Full(c)
    full.on = True
    await asyncio.sleep(62)  # at rest each replica makes one dry run a minute
    for name in THREE:
        context = c[name].context
        assert "quota is used up" in context.outage()
        assert context.is_ready() == (True, ""), "its members are served nowhere better"
    lost = members[0].worker
    members[0].drop()
    await asyncio.sleep(60)
    assert c.worker(lost) is not None, "it could not register again"
    assert not members[1].over.is_set()
    full.on = False
    await asyncio.sleep(2)
    assert [c[name].context.outage() for name in THREE] == ["", "", ""]
    await asyncio.sleep(20)
    assert c.worker(lost) is None, "now it is declared dead"


@in_cluster(Full)
async def test_a_refused_write_starts_a_dry_run_at_once(c: Cluster, full: Full) -> None:
    full.on = True
    node = c["r1"]
    with pytest.raises(Unavailable):
        await node.context.store.execute(Txn(success=(Put(key="/other", value=b""),)))
    await asyncio.sleep(3)
    assert "quota is used up" in node.context.outage()
    full.on = False
    await asyncio.sleep(2)
    assert node.context.outage() == ""
