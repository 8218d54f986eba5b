"""Reads in pages, and the real behaviour of a full etcd."""

from __future__ import annotations

import asyncio

import pytest

from strata.core.kv.txn import Delete, Put, Range, RangeResult, Txn, prefix_end, read_prefix
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.errors import Unavailable
from strata.etcd import EtcdStore, kv
from tests.etcd_fixtures import StartEtcd


async def fill(store: EtcdStore, prefix: str, count: int) -> int:
    """Write that many keys; return the last revision."""
    revision = 0
    for start in range(0, count, 100):
        names = range(start, min(count, start + 100))
        puts = tuple(Put(key=f"{prefix}{number:05}", value=b"%d" % number) for number in names)
        revision = (await store.execute(Txn(success=puts))).revision
    return revision


async def test_a_range_is_read_in_pages_of_one_revision(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "PAGE_KEYS", 100)
    prefix = "/pages/"
    async with await EtcdStore.connect(etcd.endpoints) as store:
        revision = await fill(store, prefix, 1_050)
        whole = [f"{prefix}{number:05}" for number in range(1_050)]

        async def meddle() -> None:
            for number in range(0, 1_050, 10):
                key = f"{prefix}{number:05}"
                await store.execute(Txn(success=(Delete(key=key),)))
                await store.execute(Txn(success=(Put(key=key + "x", value=b""),)))

        meddling = asyncio.create_task(meddle())
        while not meddling.done():
            result = await store.read(read_prefix(prefix))
            stamps = [each.mod_revision for each in result.kvs]
            assert max(stamps) <= result.revision
            written = (result.revision - revision) // 2
            deleted = (result.revision - revision + 1) // 2
            assert len(result.kvs) == 1_050 + written - deleted
            assert not result.more
        await meddling
        old = await store.read(read_prefix(prefix, revision=revision))
        assert [each.key for each in old.kvs] == whole
        assert old.kvs[7].value == b"7"


async def test_pages_begin_again_when_their_revision_is_compacted(
    start_etcd: StartEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "PAGE_KEYS", 10)
    cluster = start_etcd()
    async with await EtcdStore.connect(cluster.endpoints) as store:
        await fill(store, "/k/", 25)
        pages: list[int] = []
        one_page = kv.KeyValues._page

        async def compact_after_the_first(self: kv.KeyValues, request: Range) -> RangeResult:
            result = await one_page(self, request)
            pages.append(request.revision)
            if len(pages) == 1:
                await store.compact(await fill(store, "/other/", 1))
            return result

        monkeypatch.setattr(kv.KeyValues, "_page", compact_after_the_first)
        result = await store.read(read_prefix("/k/"))
        assert len(result.kvs) == 25
        assert pages == [0, 0, result.revision, result.revision]


async def test_a_callers_limit_applies_across_pages(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "PAGE_KEYS", 2)
    prefix = "/limit/"
    async with await EtcdStore.connect(etcd.endpoints) as store:
        await fill(store, prefix, 10)
        result = await store.read(Range(key=prefix, range_end=prefix_end(prefix), limit=5))
        assert (len(result.kvs), result.more) == (5, True)


async def test_a_full_etcd_may_refuse_a_write_that_it_applied(start_etcd: StartEtcd) -> None:
    """Why "database space exceeded" counts as an unknown outcome (`strata.etcd.errors`)."""
    cluster = start_etcd(extra_args=("--quota-backend-bytes=4000000",))
    async with await EtcdStore.connect(cluster.endpoints) as store:
        refused: set[str] = set()

        async def write(writer: int) -> None:
            for number in range(40):
                key = f"/full/{writer:02}/{number:02}"
                try:
                    await store.execute(Txn(success=(Put(key=key, value=b"x" * 20_000),)))
                except Unavailable as error:
                    assert "database space exceeded" in error.message  # noqa: PT017  # any of many calls may fail
                    refused.add(key)

        await asyncio.gather(*map(write, range(32)))
        there = {each.key for each in (await store.read(read_prefix("/full/"))).kvs}
        # The number of rejected keys that exist varies: 31 of 1,000 once, and none on a busy machine.
        assert refused - there
        assert [alarm.kind for alarm in await store.cluster.alarms()] == ["NOSPACE"]

        # the remedy: delete, compact, defragment, disarm
        revision = (await store.execute(Txn(success=(Delete(key="/full/", range_end="/full0"),)))).revision
        await store.compact(revision, physical_s=30.0)
        await store.cluster.defragment((await store.cluster.status()).endpoint)
        for alarm in await store.cluster.alarms():
            await store.cluster.disarm(alarm)
        await store.execute(Txn(success=(Put(key="/full/again", value=b""),)))
