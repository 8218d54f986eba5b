"""Fixtures for real etcd; `tests/conftest.py` registers them, so every test may request them.

`etcd` is one member, shared by the whole run: a test must use keys of its own. `etcd_cluster` is three
members for one test alone, which may kill and freeze them. `start_etcd` starts any other cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from strata.devcluster.etcd_binary import EtcdBinary, find_etcd
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.etcd_http import EtcdTls
from strata.errors import InvalidArgument
from strata.etcd import EtcdStore


class StartEtcd(Protocol):
    """The `start_etcd` fixture: its clusters end with the test."""

    def __call__(
        self,
        members: int = 1,
        *,
        tls: EtcdTls | None = None,
        extra_args: tuple[str, ...] = (),
        fsync: bool = False,
    ) -> EtcdCluster: ...


@pytest.fixture(scope="session")
def etcd_binary(etcd_bin: Path) -> EtcdBinary:
    """The etcd that all tests run with."""
    return find_etcd(flag=etcd_bin)


@pytest.fixture(scope="session")
def etcd(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member for the whole run; a test must use keys that no other test uses, and compact nothing."""
    cluster = EtcdCluster.start(tmp_path_factory.mktemp("etcd"), binary=etcd_binary, fsync=False)
    yield cluster
    cluster.kill()


@pytest.fixture
def start_etcd(etcd_binary: EtcdBinary, tmp_path: Path) -> Iterator[StartEtcd]:
    """A function that starts a cluster for this test alone."""
    number = itertools.count(1)
    with contextlib.ExitStack() as running:

        def start(
            members: int = 1,
            *,
            tls: EtcdTls | None = None,
            extra_args: tuple[str, ...] = (),
            fsync: bool = False,
        ) -> EtcdCluster:
            cluster = EtcdCluster.start(
                tmp_path / f"cluster-{next(number)}",
                members=members,
                binary=etcd_binary,
                tls=tls,
                extra_args=extra_args,
                fsync=fsync,
            )
            running.callback(cluster.kill)
            return cluster

        yield start


@pytest.fixture
def etcd_cluster(start_etcd: StartEtcd) -> EtcdCluster:
    """Three members for this test alone, healthy, with etcd's default timing."""
    return start_etcd(3)


async def hash_at(store: EtcdStore, endpoint: str, revision: int) -> tuple[int, int]:
    """Return a member's hash at `revision`, once the member has applied that revision."""
    async with asyncio.timeout(30.0):
        while True:
            try:
                return await store.cluster.hash_kv(endpoint, revision)
            except InvalidArgument as error:
                if "future revision" not in error.message:
                    raise
                await asyncio.sleep(0.01)  # etcd offers no call that waits for a revision on one member


async def hashes_of_members(store: EtcdStore, revision: int) -> set[tuple[int, int]]:
    """Return the different hashes that the members have at `revision`, once each of them has applied it."""
    return {await hash_at(store, endpoint, revision) for endpoint in await store.cluster.statuses()}
