"""etcd's user authentication: login, renewed login, and denied permissions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc.aio import Metadata

from strata.core.kv.txn import Put, Range, Txn, WatchBatch, prefix_end
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.errors import ConfigError, Refused
from strata.etcd import EtcdStore
from strata.etcd.watch import Watch
from strata.etcdapi import auth_pb2, authpb_pb2
from strata.etcdapi.auth_pb2_grpc import AuthStub
from tests.etcd_fixtures import StartEtcd

PREFIX = "/strata/"
USER, PASSWORD = "strata", "correct horse"
ROOT, ROOT_PASSWORD = "root", "battery staple"
LIMIT_S = 30.0


class Operator:
    """Changes etcd's users as root, like an operator."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._auth = AuthStub(channel)
        self._token = Metadata()

    async def set_up(self) -> None:
        auth = self._auth
        for name, password, role in ((ROOT, ROOT_PASSWORD, "root"), (USER, PASSWORD, "coordinator")):
            await auth.RoleAdd(auth_pb2.AuthRoleAddRequest(name=role))
            await auth.UserAdd(auth_pb2.AuthUserAddRequest(name=name, password=password))
            await auth.UserGrantRole(auth_pb2.AuthUserGrantRoleRequest(user=name, role=role))
        await self.grant(PREFIX)
        await auth.AuthEnable(auth_pb2.AuthEnableRequest())
        await self.log_in()

    async def log_in(self) -> None:
        request = auth_pb2.AuthenticateRequest(name=ROOT, password=ROOT_PASSWORD)
        self._token = Metadata(("token", (await self._auth.Authenticate(request)).token))

    async def grant(self, prefix: str) -> None:
        permission = authpb_pb2.Permission(
            permType=authpb_pb2.Permission.READWRITE,
            key=prefix.encode(),
            range_end=prefix_end(prefix).encode(),
        )
        request = auth_pb2.AuthRoleGrantPermissionRequest(name="coordinator", perm=permission)
        await self._auth.RoleGrantPermission(request, metadata=self._token)

    async def forget_all_tokens(self) -> None:
        """Invalidate all tokens together, as an expiry does for one token."""
        await self._auth.AuthDisable(auth_pb2.AuthDisableRequest(), metadata=self._token)
        await self._auth.AuthEnable(auth_pb2.AuthEnableRequest())
        await self.log_in()


@pytest.fixture
def cluster(start_etcd: StartEtcd) -> EtcdCluster:
    return start_etcd()


@pytest.fixture
async def operator(cluster: EtcdCluster) -> AsyncIterator[Operator]:
    target = cluster.endpoints[0].removeprefix("http://")
    async with grpc.aio.insecure_channel(target) as channel:
        operator = Operator(channel)
        await operator.set_up()
        yield operator


async def connect(cluster: EtcdCluster) -> EtcdStore:
    return await EtcdStore.connect(cluster.endpoints, user=USER, password=PASSWORD)


async def put(store: EtcdStore, name: str) -> int:
    return (await store.execute(Txn(success=(Put(key=PREFIX + name, value=b""),)))).revision


async def until(watch: Watch, revision: int) -> WatchBatch:
    async with asyncio.timeout(LIMIT_S):
        while (batch := await anext(watch)).revision < revision:
            pass
        return batch


@pytest.mark.usefixtures("operator")
async def test_a_user_may_use_the_keys_of_its_role(cluster: EtcdCluster) -> None:
    async with await connect(cluster) as store:
        revision = await put(store, "a")
        assert (await store.read(Range(key=PREFIX + "a"))).kvs
        lease = await store.grant(30)
        assert await store.keep_alive(lease.id) == 30
        await store.revoke(lease.id)
        async with store.watch(PREFIX, prefix_end(PREFIX), start_revision=revision) as watch:
            assert (await until(watch, revision)).events


@pytest.mark.usefixtures("operator")
async def test_a_user_is_denied_keys_outside_of_its_role(cluster: EtcdCluster) -> None:
    async with await connect(cluster) as store:
        with pytest.raises(Refused, match="permission denied"):
            await store.execute(Txn(success=(Put(key="/other", value=b""),)))
        with pytest.raises(Refused, match="permission denied"):
            await store.read(Range(key="/other"))
        async with store.watch("/other", None, start_revision=1) as watch:
            with pytest.raises(Refused, match="permission denied"):
                await until(watch, 1)
        await put(store, "still allowed")


@pytest.mark.usefixtures("operator")
async def test_a_wrong_password_is_a_config_error(cluster: EtcdCluster) -> None:
    with pytest.raises(ConfigError, match="invalid user ID or password"):
        await EtcdStore.connect(cluster.endpoints, user=USER, password="wrong")


@pytest.mark.usefixtures("operator")
async def test_connecting_without_a_user_is_a_config_error_if_etcd_requires_one(cluster: EtcdCluster) -> None:
    with pytest.raises(ConfigError, match="requires a user"):
        await EtcdStore.connect(cluster.endpoints)


async def test_calls_without_a_user_fail_once_authentication_is_enabled(cluster: EtcdCluster) -> None:
    async with (
        await EtcdStore.connect(cluster.endpoints) as store,
        grpc.aio.insecure_channel(cluster.endpoints[0].removeprefix("http://")) as channel,
    ):
        await Operator(channel).set_up()
        with pytest.raises(ConfigError, match="requires a user"):
            await put(store, "a")
        with pytest.raises(ConfigError, match="requires a user"):
            await store.read(Range(key=PREFIX))
        async with store.watch(PREFIX, None, start_revision=1) as watch:
            with pytest.raises(ConfigError, match=r"requires a user|invalid auth token"):
                await until(watch, 1)


@pytest.mark.usefixtures("operator")
async def test_compact_status_and_hash_kv_need_the_root_role(cluster: EtcdCluster) -> None:
    """Under etcd's authentication, some calls (such as compaction) need a user with the role root."""
    async with await connect(cluster) as store:
        assert store.verdict is None
        assert await store.cluster.members()
        revision = await put(store, "a")
        (endpoint,) = await store.cluster.statuses()
        for call in (
            store.compact(revision),
            store.cluster.status(),
            store.cluster.hash_kv(endpoint, revision),
        ):
            with pytest.raises(Refused, match="permission denied"):
                await call
    async with await EtcdStore.connect(cluster.endpoints, user=ROOT, password=ROOT_PASSWORD) as store:
        assert store.verdict is not None
        await store.compact(revision)


async def use_it(store: EtcdStore, watch: Watch, lease: int) -> None:
    """Write, read, renew and watch at the same time.

    Each call finds the token stale, or already renewed by another call.
    """
    revision, _, ttl_s = await asyncio.gather(
        put(store, "b"), store.read(Range(key=PREFIX)), store.keep_alive(lease)
    )
    assert ttl_s == 30
    assert (await until(watch, revision)).revision >= revision


@pytest.mark.parametrize("cause", ["expired", "role changed", "restarted"])
async def test_a_lost_token_is_renewed_without_an_error(
    cluster: EtcdCluster, operator: Operator, cause: str
) -> None:
    async with await connect(cluster) as store:
        lease = (await store.grant(30)).id
        first = await put(store, "a")
        async with store.watch(PREFIX, prefix_end(PREFIX), start_revision=first) as watch:
            await until(watch, first)
            match cause:
                case "expired":
                    await operator.forget_all_tokens()
                case "role changed":
                    await operator.grant("/more/")
                case _:
                    cluster.members[0].restart()
                    assert (await store.read(Range(key=PREFIX))).revision == first
            await use_it(store, watch, lease)


async def test_a_store_logs_in_once_authentication_is_enabled(cluster: EtcdCluster) -> None:
    async with await connect(cluster) as store:
        await put(store, "a")
        async with grpc.aio.insecure_channel(cluster.endpoints[0].removeprefix("http://")) as channel:
            await Operator(channel).set_up()
        await put(store, "b")


async def test_any_member_knows_the_token(start_etcd: StartEtcd) -> None:
    cluster = start_etcd(3)
    async with grpc.aio.insecure_channel(cluster.endpoints[0].removeprefix("http://")) as channel:
        await Operator(channel).set_up()
    async with await connect(cluster) as store:
        await put(store, "a")
        serving = store._connection._current.name
        next(member for member in cluster.members if member.endpoint.endswith(serving)).kill()
        async with asyncio.timeout(LIMIT_S):
            assert (await store.read(Range(key=PREFIX + "a"))).kvs


@pytest.mark.usefixtures("operator")
async def test_a_member_with_authentication_is_healthy_after_a_restart(cluster: EtcdCluster) -> None:
    await asyncio.to_thread(cluster.members[0].restart)
    await asyncio.to_thread(cluster.wait_healthy, LIMIT_S)
