"""Renewals of leases: one at a time, with a time limit, and each answer matched to its own request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from strata.errors import NotFound, Unavailable
from strata.etcdapi import lease_pb2
from tests.unit.etcd.fake_etcd import FakeEtcd, Session, failing, quick, soon, store_on


@pytest.fixture
async def one() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as fake:
        yield fake


@pytest.fixture
async def other() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as fake:
        yield fake


def renewed(fake: FakeEtcd, lease_id: int, ttl_s: int = 5) -> lease_pb2.LeaseKeepAliveResponse:
    return lease_pb2.LeaseKeepAliveResponse(header=fake.header(), ID=lease_id, TTL=ttl_s)


async def stream(fake: FakeEtcd) -> Session:
    session: Session = await soon(fake.renewals.get())
    return session


async def test_renewals_share_a_stream_that_requires_a_leader(one: FakeEtcd) -> None:
    async with store_on(one) as store:
        first = asyncio.ensure_future(store.keep_alive(1))
        session = await stream(one)
        assert session.metadata["hasleader"] == "true"
        session.send(renewed(one, (await session.request()).ID))
        assert await soon(first) == 5
        second = asyncio.ensure_future(store.keep_alive(2))
        session.send(renewed(one, (await session.request()).ID, ttl_s=9))
        assert await soon(second) == 9
    assert one.renewals.empty()


async def test_one_renewal_is_outstanding(one: FakeEtcd) -> None:
    async with store_on(one) as store:
        both = [asyncio.ensure_future(store.keep_alive(lease_id)) for lease_id in (1, 2)]
        session = await stream(one)
        assert (await session.request()).ID == 1
        # the stream stayed open and idle until the answer
        assert session.requests.empty()
        session.send(renewed(one, 1))
        assert (await session.request()).ID == 2
        session.send(renewed(one, 2))
        assert await soon(asyncio.gather(*both)) == [5, 5]


@pytest.mark.parametrize("ttl_s", [0, -1])
async def test_renewing_an_expired_lease_raises_not_found(one: FakeEtcd, ttl_s: int) -> None:
    async with store_on(one) as store:
        call = asyncio.ensure_future(store.keep_alive(1))
        session = await stream(one)
        session.send(renewed(one, 1, ttl_s=ttl_s))
        with pytest.raises(NotFound):
            await soon(call)


async def test_a_late_renewal_answer_does_not_answer_the_next_renewal(one: FakeEtcd, other: FakeEtcd) -> None:
    async with store_on(one, other, timing=quick(request_s=0.1)) as store:
        call = asyncio.ensure_future(store.keep_alive(1))
        silent = await stream(one)
        with pytest.raises(Unavailable, match="in time"):
            await soon(call)
        call = asyncio.ensure_future(store.keep_alive(1))
        session = await stream(other)
        silent.send(renewed(one, 1))
        session.send(renewed(other, 1, ttl_s=3))
        assert await soon(call) == 3
        await soon(silent.ended.wait())


async def test_a_broken_stream_is_replaced_within_the_call(one: FakeEtcd, other: FakeEtcd) -> None:
    async with store_on(one, other) as store:
        call = asyncio.ensure_future(store.keep_alive(1))
        session = await stream(one)
        session.end(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
        session = await stream(other)
        session.send(renewed(other, 1))
        assert await soon(call) == 5


async def test_a_cancelled_renewal_leaves_no_answer_behind(one: FakeEtcd) -> None:
    async with store_on(one) as store:
        call = asyncio.ensure_future(store.keep_alive(1))
        session = await stream(one)
        await session.request()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        call = asyncio.ensure_future(store.keep_alive(1))
        session = await stream(one)
        session.send(renewed(one, 1, ttl_s=4))
        assert await soon(call) == 4


async def test_an_answer_of_an_older_term_is_refused(one: FakeEtcd, other: FakeEtcd) -> None:
    async with store_on(one, other) as store:
        store._connection.guard.term = 9
        other.term = 9
        call = asyncio.ensure_future(store.keep_alive(1))
        session = await stream(one)
        session.send(renewed(one, 1))
        session = await stream(other)
        session.send(renewed(other, 1))
        assert await soon(call) == 5


async def test_renewals_have_a_connection_of_their_own(one: FakeEtcd) -> None:
    async with store_on(one) as store:
        call = asyncio.ensure_future(store.keep_alive(1))
        session = await stream(one)
        session.send(renewed(one, 1))
        await soon(call)
        assert store._renewals.endpoints[0].channel is not store._connection.endpoints[0].channel


async def test_revoking_an_unknown_lease_is_no_error(one: FakeEtcd) -> None:
    text = "etcdserver: requested lease not found"
    one.replies["LeaseRevoke"] = failing(grpc.StatusCode.NOT_FOUND, text)
    async with store_on(one) as store:
        await store.revoke(1)


async def test_closing_ends_a_renewal(one: FakeEtcd) -> None:
    async with store_on(one, timing=quick(request_s=0.5)) as store:
        call = asyncio.ensure_future(store.keep_alive(1))
        session = await stream(one)
        await session.request()
        await store.close()
        with pytest.raises(Unavailable):
            await soon(call)
