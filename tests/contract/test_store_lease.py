"""Leases: granted, renewed, expired and revoked, and the effect on their keys."""

from __future__ import annotations

import asyncio

import pytest

from strata.core.kv.txn import Delete, Txn
from strata.errors import NotFound
from tests.contract.conftest import Subject


async def test_granting_a_lease_creates_no_revision(subject: Subject) -> None:
    before = await subject.head()
    one, two = await subject.store.grant(60), await subject.store.grant(60)
    assert one.id != two.id
    assert one.ttl_s == two.ttl_s == 60
    assert await subject.head() == before


@pytest.mark.parametrize("requested", [-1, 0])
async def test_a_lease_lasts_at_least_one_second(subject: Subject, requested: int) -> None:
    assert (await subject.store.grant(requested)).ttl_s >= 1


async def test_revoking_a_lease_deletes_its_keys_in_one_revision(subject: Subject) -> None:
    lease = await subject.store.grant(60)
    await subject.put("c", "a", lease=lease.id)
    await subject.put("b", lease=lease.id)
    before = await subject.put("kept")
    kv = await subject.get("a")
    assert kv is not None
    assert kv.lease == lease.id
    await subject.store.revoke(lease.id)
    assert await subject.names() == ["kept"]
    assert await subject.head() == before + 1
    async with subject.watching(before + 1) as watcher:
        assert await watcher.changes(3) == ["-a", "-b", "-c"]


async def test_a_lease_without_keys_ends_without_a_write(subject: Subject) -> None:
    before = await subject.head()
    lease = await subject.store.grant(60)
    await subject.store.revoke(lease.id)
    assert await subject.head() == before


async def test_the_last_put_decides_about_the_lease(subject: Subject) -> None:
    one, two = await subject.store.grant(60), await subject.store.grant(60)
    for name in ("moved", "freed", "renewed"):
        await subject.put(name, lease=one.id)
    await subject.put("moved", lease=two.id)
    await subject.put("freed")
    await subject.store.execute(Txn(success=(Delete(key=subject.key("renewed")),)))
    await subject.put("renewed")
    await subject.store.revoke(one.id)
    assert await subject.names() == ["freed", "moved", "renewed"]
    await subject.store.revoke(two.id)
    assert await subject.names() == ["freed", "renewed"]


async def test_an_expired_lease_deletes_its_keys(subject: Subject) -> None:
    lease = await subject.store.grant(1)
    assert lease.ttl_s == 1
    begin = asyncio.get_running_loop().time()
    revision = await subject.put("a", "b", lease=lease.id)
    async with subject.watching(revision + 1) as watcher:
        assert await watcher.changes(2) == ["-a", "-b"]
    assert asyncio.get_running_loop().time() - begin > 0.9
    assert await subject.head() == revision + 1
    with pytest.raises(NotFound):
        await subject.store.keep_alive(lease.id)
    with pytest.raises(NotFound):
        await subject.put("c", lease=lease.id)


async def test_a_lease_lives_while_it_is_renewed(subject: Subject) -> None:
    lease = await subject.store.grant(3)  # much longer than a busy machine may delay this test
    revision = await subject.put("a", lease=lease.id)
    async with subject.watching(revision + 1) as watcher:
        deleted = asyncio.ensure_future(watcher.changes(1))
        for _ in range(5):
            assert await subject.store.keep_alive(lease.id) == 3
            done, _pending = await asyncio.wait([deleted], timeout=0.8)
            assert not done
        assert await deleted == ["-a"]


async def test_renewing_a_revoked_or_unknown_lease_raises_not_found(subject: Subject) -> None:
    lease = await subject.store.grant(60)
    await subject.store.revoke(lease.id)
    with pytest.raises(NotFound):
        await subject.store.keep_alive(lease.id)
    with pytest.raises(NotFound):
        await subject.store.keep_alive(4711)


async def test_revoking_a_lease_twice_is_no_error(subject: Subject) -> None:
    lease = await subject.store.grant(60)
    await subject.store.revoke(lease.id)
    await subject.store.revoke(lease.id)


async def test_any_client_may_use_a_lease(subject: Subject) -> None:
    lease = await subject.store.grant(60)
    assert await subject.other.keep_alive(lease.id) == 60
    await subject.put("a", lease=lease.id)
    await subject.other.revoke(lease.id)
    assert await subject.names() == []
