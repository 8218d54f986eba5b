"""The choice of the member for a call, and the retries of calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from strata.core.kv.txn import Put, Range, Txn
from strata.errors import ClusterReplaced, ConfigError, InvalidArgument, Refused, Unavailable
from strata.etcd import EtcdStore
from strata.etcdapi import auth_pb2, kv_pb2
from tests.unit.etcd.fake_etcd import FakeEtcd, failing, quick, soon, store_on

WRITE = Txn(success=(Put(key="k", value=b"v"),))
READ = Range(key="k")

INDETERMINATE = [
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
]


@pytest.fixture
async def one() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as fake:
        yield fake


@pytest.fixture
async def other() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as fake:
        yield fake


async def wait_exit(store: EtcdStore, index: int = 0) -> None:
    """Return once the client's transport has noticed the end of this endpoint's server."""
    endpoint = store._connection.endpoints[index]
    while endpoint.ready:
        await soon(endpoint.channel.wait_for_state_change(grpc.ChannelConnectivity.READY))


@pytest.mark.parametrize("code", INDETERMINATE)
async def test_an_indeterminate_transaction_is_not_retried_and_the_next_uses_another_member(
    one: FakeEtcd, other: FakeEtcd, code: grpc.StatusCode
) -> None:
    one.replies["Txn"] = failing(code, "boom")
    async with store_on(one, other) as store:
        with pytest.raises(Unavailable, match="boom"):
            await store.execute(WRITE)
        assert (one.count("Txn"), other.count("Txn")) == (1, 0)
        await store.execute(WRITE)
        assert (one.count("Txn"), other.count("Txn")) == (1, 1)


async def test_a_refused_transaction_keeps_the_connection_on_its_member(
    one: FakeEtcd, other: FakeEtcd
) -> None:
    text = "etcdserver: duplicate key given in txn request"
    one.replies["Txn"] = failing(grpc.StatusCode.INVALID_ARGUMENT, text, times=1)
    async with store_on(one, other) as store:
        with pytest.raises(InvalidArgument, match="duplicate key"):
            await store.execute(WRITE)
        await store.execute(WRITE)
    assert (one.count("Txn"), other.count("Txn")) == (2, 0)


async def test_a_failed_read_is_retried_at_another_member(one: FakeEtcd, other: FakeEtcd) -> None:
    one.replies["Range"] = failing(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
    async with store_on(one, other) as store:
        await store.read(READ)
    assert (one.count("Range"), other.count("Range")) == (1, 1)


async def test_a_read_gives_up_when_its_time_is_over(one: FakeEtcd) -> None:
    one.replies["Range"] = failing(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
    async with store_on(one, timing=quick(read_s=0.1)) as store:
        with pytest.raises(Unavailable, match="no leader"):
            await soon(store.read(READ))
    assert one.count("Range") > 1


async def test_a_member_that_does_not_answer_is_left_after_the_deadline(
    one: FakeEtcd, other: FakeEtcd
) -> None:
    async def never(_request: Any, _context: Any) -> None:
        await asyncio.Event().wait()

    one.replies["Range"] = never
    async with store_on(one, other, timing=quick(request_s=0.1)) as store:
        await soon(store.read(READ))
        await store.execute(WRITE)
    assert (one.count("Txn"), other.count("Txn")) == (0, 1)


async def test_a_stopped_member_gets_no_call(one: FakeEtcd, other: FakeEtcd) -> None:
    async with store_on(one, other) as store:
        await one.server.stop(None)
        await wait_exit(store)
        for _ in range(3):
            await store.execute(WRITE)
    assert (one.count("Txn"), other.count("Txn")) == (0, 3)


async def test_an_answer_of_an_older_raft_term_is_refused(one: FakeEtcd, other: FakeEtcd) -> None:
    one.term = other.term = 5
    async with store_on(one, other) as store:
        await store.read(READ)
        one.term = 4
        with pytest.raises(Unavailable, match="raft term 4"):
            await store.execute(WRITE)
        await store.execute(WRITE)
        await store.read(READ)
    assert other.count("Txn") == 1


async def test_answers_may_overtake_each_other(one: FakeEtcd) -> None:
    requested, release = asyncio.Event(), asyncio.Event()

    async def late(_request: Any, _context: Any) -> Any:
        answer = kv_pb2.TxnResponse(header=one.header(), succeeded=True)
        requested.set()
        await release.wait()
        return answer

    async with store_on(one) as store:
        one.replies["Txn"] = late
        slow = asyncio.ensure_future(store.execute(WRITE))
        await soon(requested.wait())
        one.term = 9
        await store.read(READ)
        release.set()
        assert (await soon(slow)).succeeded


async def test_another_cluster_is_refused(one: FakeEtcd) -> None:
    async with store_on(one) as store:
        one.cluster_id = 8
        with pytest.raises(ClusterReplaced, match="cluster 8, not 7"):
            await store.read(READ)
        with pytest.raises(ClusterReplaced):
            await store.execute(WRITE)


async def test_a_stale_token_costs_one_login_for_all_calls(one: FakeEtcd) -> None:
    async def ask_for_the_second_token(_request: Any, context: Any) -> None:
        if dict(context.invocation_metadata())["token"] == "token-1":
            text = "etcdserver: invalid auth token"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    one.replies["Txn"] = ask_for_the_second_token
    async with store_on(one, user="u") as store:
        await asyncio.gather(*(store.execute(WRITE) for _ in range(5)))
    assert one.count("Authenticate") == 2
    assert one.count("Txn") == 10


async def test_a_token_that_is_never_good_is_an_error(one: FakeEtcd) -> None:
    text = "etcdserver: invalid auth token"
    one.replies["Txn"] = failing(grpc.StatusCode.UNAUTHENTICATED, text)
    async with store_on(one, user="u") as store:
        with pytest.raises(ConfigError, match="invalid auth token"):
            await store.execute(WRITE)
    assert one.count("Txn") == 2


async def test_a_wrong_password_is_an_error_at_once(one: FakeEtcd) -> None:
    text = "etcdserver: authentication failed, invalid user ID or password"
    one.replies["Authenticate"] = failing(grpc.StatusCode.INVALID_ARGUMENT, text)
    with pytest.raises(ConfigError, match="invalid user ID or password"):
        await EtcdStore.connect([one.address], user="u", password="secret-word")
    assert one.count("Authenticate") == 1


async def test_a_user_is_ignored_if_authentication_is_disabled(one: FakeEtcd) -> None:
    text = "etcdserver: authentication is not enabled"
    one.replies["Authenticate"] = failing(grpc.StatusCode.FAILED_PRECONDITION, text)
    async with store_on(one, user="u") as store:
        await store.execute(WRITE)
    assert "token" not in one.calls[-1][2]


async def test_a_missing_permission_is_a_refusal(one: FakeEtcd) -> None:
    one.replies["Txn"] = failing(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
    async with store_on(one) as store:
        with pytest.raises(Refused, match="permission denied"):
            await store.execute(WRITE)


async def test_the_password_is_sent_and_never_shown(one: FakeEtcd) -> None:
    store = await EtcdStore.connect([one.address], user="u", password="secret-word")
    async with store:
        sent = next(request for name, request, _ in one.calls if name == "Authenticate")
        assert sent == auth_pb2.AuthenticateRequest(name="u", password="secret-word")
        assert "secret-word" not in repr(vars(store))


async def test_a_failed_connection_names_every_endpoint() -> None:
    with pytest.raises(Unavailable, match=r"127.0.0.1:1: .*; etcd 127.0.0.1:2: |127.0.0.1:2: .*127.0.0.1:1"):
        await soon(EtcdStore.connect(["127.0.0.1:1", "127.0.0.1:2"], timing=quick(connect_s=0.1)))


async def test_one_endpoint_of_two_is_enough(one: FakeEtcd) -> None:
    async with await EtcdStore.connect(["127.0.0.1:1", one.address], timing=quick()) as store:
        await store.execute(WRITE)


async def test_an_etcd_too_old_is_refused(one: FakeEtcd) -> None:
    one.version = "3.3.27"
    with pytest.raises(ConfigError, match="too old"):
        await EtcdStore.connect([one.address])


async def test_an_etcd_with_known_bugs_is_named(one: FakeEtcd) -> None:
    one.version = "3.5.12"
    async with store_on(one) as store:
        assert store.verdict is not None
        assert "etcd#15247" in store.verdict.reason


async def test_an_etcd_that_keeps_its_version_secret_is_used(one: FakeEtcd) -> None:
    one.replies["Status"] = failing(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
    async with store_on(one, user="u") as store:
        assert store.verdict is None
        await store.execute(WRITE)


async def test_closing_ends_calls_in_flight(one: FakeEtcd) -> None:
    requested = asyncio.Event()

    async def never(_request: Any, _context: Any) -> None:
        requested.set()
        await asyncio.Event().wait()

    one.replies["Txn"] = never
    async with store_on(one) as store:
        call = asyncio.ensure_future(store.execute(WRITE))
        await soon(requested.wait())
        await store.close()
        with pytest.raises(Unavailable, match="closed"):
            await soon(call)
        with pytest.raises(Unavailable, match="closed"):
            await store.execute(WRITE)


async def test_a_caller_may_cancel(one: FakeEtcd) -> None:
    requested = asyncio.Event()

    async def never(_request: Any, _context: Any) -> None:
        requested.set()
        await asyncio.Event().wait()

    one.replies["Range"] = never
    async with store_on(one) as store:
        call = asyncio.ensure_future(store.read(READ))
        await soon(requested.wait())
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert one.count("Range") == 1


async def test_a_member_that_returns_is_used_again(one: FakeEtcd, other: FakeEtcd) -> None:
    async with store_on(one, other) as store:
        await one.server.stop(None)
        await wait_exit(store)
        await store.execute(WRITE)
        back = FakeEtcd(port=one.port)
        async with back:
            endpoint = store._connection.endpoints[0]
            await soon(endpoint.channel.channel_ready())
            await other.server.stop(None)
            await wait_exit(store, 1)
            await store.execute(WRITE)
            assert back.count("Txn") == 1


async def test_waiting_for_a_member_does_not_hold_up_the_rest(one: FakeEtcd) -> None:
    async with store_on(one) as store:
        await one.server.stop(None)
        await wait_exit(store)
        call = asyncio.ensure_future(store.read(READ))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not call.done()
        async with FakeEtcd(port=one.port) as back:
            await soon(call)
            assert back.count("Range") == 1


def test_time_is_monotonic() -> None:
    assert quick().now is time.monotonic
