"""Members of a real etcd cluster: list, move leadership, add, remove."""

from __future__ import annotations

import asyncio

import pytest

from strata.core.kv.txn import Put, Range, Txn
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.errors import NotFound, Refused, Unavailable
from strata.etcd import EtcdStore, MemberStatus
from tests.etcd_fixtures import StartEtcd, hash_at, hashes_of_members

LIMIT_S = 30.0


async def test_members_are_listed_with_their_statuses(etcd_cluster: EtcdCluster) -> None:
    async with await EtcdStore.connect(etcd_cluster.endpoints) as store:
        revision = (await store.execute(Txn(success=(Put(key="k", value=b""),)))).revision
        members = await store.cluster.members()
        assert sorted(member.name for member in members) == ["etcd-1", "etcd-2", "etcd-3"]
        assert {url for member in members for url in member.client_urls} == set(etcd_cluster.endpoints)

        victim = etcd_cluster.members[0]
        victim.kill()
        for member in etcd_cluster.members[1:]:
            await hash_at(
                store, member.endpoint.removeprefix("http://"), revision
            )  # waits for a member that lags
        statuses = await store.cluster.statuses()
        dead = statuses.pop(victim.endpoint.removeprefix("http://"))
        assert isinstance(dead, Unavailable)
        for status in statuses.values():
            assert isinstance(status, MemberStatus)
            assert status.version == str(etcd_cluster.binary.version)
            assert status.revision == revision
            assert status.db_bytes >= status.db_bytes_in_use > 0


async def test_leadership_moves_to_the_named_member(etcd_cluster: EtcdCluster) -> None:
    async with await EtcdStore.connect(etcd_cluster.endpoints) as store, asyncio.timeout(LIMIT_S):
        before = await store.cluster.status()
        target = next(m for m in await store.cluster.members() if m.id != before.leader_id)
        await store.cluster.move_leader(target.id)
        while (await store.cluster.status()).leader_id != target.id:
            pass
        await store.execute(Txn(success=(Put(key="k", value=b""),)))


async def test_all_members_have_the_same_hash(etcd_cluster: EtcdCluster) -> None:
    async with await EtcdStore.connect(etcd_cluster.endpoints) as store, asyncio.timeout(LIMIT_S):
        for number in range(20):
            await store.execute(Txn(success=(Put(key=f"k{number}", value=b"v"),)))
        revision = (await store.read(Range(key="k"))).revision
        assert len(await hashes_of_members(store, revision)) == 1


async def test_a_learner_comes_and_goes(start_etcd: StartEtcd) -> None:
    # etcd rejects membership changes until its members have been connected for 5 s
    members = start_etcd(3, extra_args=("--strict-reconfig-check=false",))
    async with await EtcdStore.connect(members.endpoints) as store:
        cluster = store.cluster
        learner = await cluster.add("http://127.0.0.1:1", learner=True)
        assert learner.learner
        assert learner in await cluster.members()
        with pytest.raises(Refused, match="in sync with leader"):
            await cluster.promote(learner.id)
        await cluster.remove(learner.id)
        await cluster.remove(learner.id)
        assert learner not in await cluster.members()


async def test_defragmenting_an_unknown_endpoint_raises_not_found(etcd: EtcdCluster) -> None:
    async with await EtcdStore.connect(etcd.endpoints) as store:
        with pytest.raises(NotFound, match="elsewhere:1"):
            await store.cluster.defragment("elsewhere:1")
        assert await store.cluster.alarms() == ()
