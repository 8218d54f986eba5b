"""TLS with real etcd: it works, and the error names the fault of an invalid set-up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.core.kv.txn import Put, Range, Txn
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.etcd_http import EtcdTls
from strata.errors import ConfigError, StrataError, Unavailable
from strata.etcd import EtcdStore, Timing, TlsConfig
from tests.certificates import Authority, etcd_identity
from tests.etcd_fixtures import StartEtcd

SHORT = Timing(connect_s=1.0)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> EtcdTls:
    return etcd_identity(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def cluster(
    etcd_binary: EtcdBinary, identity: EtcdTls, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster.start(
        tmp_path_factory.mktemp("etcd"), binary=etcd_binary, tls=identity, fsync=False
    )
    yield cluster
    cluster.kill()


def ours(identity: EtcdTls) -> TlsConfig:
    return TlsConfig(ca_file=identity.ca, cert_file=identity.cert, key_file=identity.key)


async def test_everything_works_over_tls(cluster: EtcdCluster, identity: EtcdTls) -> None:
    async with await EtcdStore.connect(cluster.endpoints, tls=ours(identity)) as store:
        revision = (await store.execute(Txn(success=(Put(key="k", value=b"v"),)))).revision
        assert (await store.read(Range(key="k"))).kvs[0].value == b"v"
        lease = await store.grant(30)
        assert await store.keep_alive(lease.id) == 30
        async with store.watch("k", None, start_revision=revision) as watch:
            assert (await anext(watch)).revision == revision


async def test_an_etcd_of_an_unknown_authority_is_rejected(
    cluster: EtcdCluster, identity: EtcdTls, tmp_path: Path
) -> None:
    stranger = TlsConfig(ca_file=Authority(tmp_path).ca, cert_file=identity.cert, key_file=identity.key)
    with pytest.raises(ConfigError, match="handshake failed") as caught:
        await EtcdStore.connect(cluster.endpoints, tls=stranger, timing=SHORT)
    assert "authority" in caught.value.hint


async def test_a_name_that_the_certificate_does_not_have_is_refused(
    cluster: EtcdCluster, identity: EtcdTls
) -> None:
    tls = TlsConfig(
        ca_file=identity.ca, cert_file=identity.cert, key_file=identity.key, server_name="etcd.example"
    )
    with pytest.raises(ConfigError, match="Hostname Verification"):
        await EtcdStore.connect(cluster.endpoints, tls=tls, timing=SHORT)


async def test_a_server_name_of_the_certificate_may_replace_the_address(
    cluster: EtcdCluster, identity: EtcdTls
) -> None:
    tls = TlsConfig(
        ca_file=identity.ca, cert_file=identity.cert, key_file=identity.key, server_name="localhost"
    )
    async with await EtcdStore.connect(cluster.endpoints, tls=tls) as store:
        await store.read(Range(key="k"))


async def test_etcd_rejects_a_client_without_a_certificate(cluster: EtcdCluster, identity: EtcdTls) -> None:
    with pytest.raises(StrataError) as caught:
        await EtcdStore.connect(cluster.endpoints, tls=TlsConfig(ca_file=identity.ca), timing=SHORT)
    assert isinstance(caught.value, ConfigError | Unavailable)


async def test_plaintext_is_not_spoken(cluster: EtcdCluster) -> None:
    bare = [endpoint.removeprefix("https://") for endpoint in cluster.endpoints]
    with pytest.raises(Unavailable, match=bare[0]):
        await EtcdStore.connect(bare, timing=SHORT)
    with pytest.raises(ConfigError, match="https://"):
        await EtcdStore.connect(cluster.endpoints, timing=SHORT)


async def test_replaced_files_are_used_for_the_next_connection(start_etcd: StartEtcd, tmp_path: Path) -> None:
    """The client uses replaced certificate and CA files for its next connection, without a restart."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("etcd")
    own_cert, own_key = authority.issue("client")
    running = start_etcd(tls=EtcdTls(cert=cert, key=key, ca=authority.ca))
    mine = TlsConfig(ca_file=authority.ca, cert_file=own_cert, key_file=own_key)
    async with await EtcdStore.connect(running.endpoints, tls=mine) as store:
        await store.read(Range(key="k"))
        other = tmp_path / "other"
        other.mkdir()
        stranger = Authority(other)
        theirs = stranger.issue("etcd")
        new = stranger.issue("client")
        # etcd moves to another authority and rejects a client with the old files
        await asyncio.to_thread(running.members[0].kill)
        for source, target in zip((*theirs, stranger.ca), (cert, key, authority.ca), strict=True):
            target.write_bytes(source.read_bytes())
        await asyncio.to_thread(running.members[0].start)
        for source, target in zip(new, (own_cert, own_key), strict=True):
            target.write_bytes(source.read_bytes())
        async with asyncio.timeout(20):
            while True:
                try:
                    await store.read(Range(key="k"))
                    break
                except Unavailable:
                    continue
