"""A control plane that authenticates its callers: three coordinators with certificates, over an etcd with its own."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from strata import CoordinatorClient
from strata.config import Credentials
from strata.core.access.authority import Role
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.etcd_http import EtcdTls
from strata.devcluster.local_cluster import LocalCluster
from strata.security.certificates import Authority

NOW = dt.datetime.now(dt.UTC)
LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """A control plane that authenticates its callers, and its certificate authority."""

    local: LocalCluster
    authority: Authority
    folder: Path

    def who(self, role: Role, id: str, **more: Any) -> Credentials:  # noqa: A002
        """Return the credentials in a new certificate of this cluster's authority."""
        return issued(self.authority, self.folder / f"{role}-{id}-{os.urandom(3).hex()}", role, id, **more)

    def client(self, credentials: Credentials, *, job: str = "default") -> CoordinatorClient:
        return CoordinatorClient.connect(
            self.local.endpoints, job=job, timeout_s=LIMIT_S, credentials=credentials
        )


def issued(authority: Authority, out: Path, role: Role, id: str, **more: Any) -> Credentials:  # noqa: A002
    authority.issue(out, role=role, id=id, **{"now": NOW, **more})
    return Credentials(ca_file=out / "ca.pem", cert_file=out / "cert.pem", key_file=out / "key.pem")


def flags(credentials: Credentials) -> tuple[str, ...]:
    names = {
        "--tls-ca-file": credentials.ca_file,
        "--tls-cert-file": credentials.cert_file,
        "--tls-key-file": credentials.key_file,
        "--token-file": credentials.token_file,
    }
    return tuple(f"{name}={path}" for name, path in names.items() if path is not None)


@pytest.fixture(scope="module")
def secured(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Three coordinators that require client certificates, over an etcd that requires them too."""
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority.create(folder / "ca", cluster="default", now=NOW)
    etcd = issued(authority, folder / "etcd", Role.ETCD, "etcd-1")
    assert etcd.cert_file is not None
    assert etcd.key_file is not None
    assert etcd.ca_file is not None

    def options(name: str) -> list[str]:
        mine = issued(authority, folder / name, Role.COORDINATOR, name)
        (folder / f"{name}.toml").write_text(
            f'[etcd]\nca_file = "{mine.ca_file}"\ncert_file = "{mine.cert_file}"\n'
            f'key_file = "{mine.key_file}"\n'
        )
        return [*flags(mine), f"--config={folder / name}.toml", "--log-format=json"]

    local = LocalCluster.start(
        folder / "data",
        etcd_members=1,
        coordinators=3,
        binary=etcd_binary,
        detect_s=2.0,
        fsync=False,
        etcd_tls=EtcdTls(cert=etcd.cert_file, key=etcd.key_file, ca=etcd.ca_file),
        options=options,
        credentials=issued(authority, folder / "asking", Role.VIEWER, "asking"),
    )
    yield Secured(local=local, authority=authority, folder=folder)
    local.kill()


def sync_channel(address: str, credentials: Credentials) -> grpc.Channel:
    assert credentials.ca_file is not None
    assert credentials.cert_file is not None
    assert credentials.key_file is not None
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(
            credentials.ca_file.read_bytes(),
            credentials.key_file.read_bytes(),
            credentials.cert_file.read_bytes(),
        ),
    )
