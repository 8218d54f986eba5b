"""Certificates for every connection of a run, as `strata certs` issues them. No process then uses plaintext.

    ca/  etcd/  observer/  operator/  coordinator-1/ …   one folder each, with cert.pem, key.pem, ca.pem
    barriers-1-0/ …                                      one for each member, by its worker id

Each client process presents the certificate of its own worker (`workloads.program.show_certificates`). So a member
can act only for itself, as in production.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from strata.config import Credentials
from strata.core.access.authority import Role
from strata.devcluster.etcd_http import EtcdTls
from strata.etcd import TlsConfig
from strata.security.certificates import CA, CERT, KEY, Authority
from strata_chaos.workloads.program import CERTIFICATES

DAYS: Final = 2.0


@dataclass(frozen=True, slots=True)
class RunCertificates:
    """The certificates of one run, below `folder`."""

    folder: Path

    @classmethod
    def issue(
        cls,
        folder: Path,
        *,
        etcd_hosts: Sequence[str],
        coordinators: Mapping[str, str],
        members: Sequence[str],
    ) -> RunCertificates:
        """Create a certificate authority and issue all certificates; `coordinators` maps names to hosts."""
        now = datetime.now(UTC)
        authority = Authority.create(folder / "ca", cluster="default", now=now, days=DAYS)

        def sign(role: Role, name: str, hosts: Sequence[str] = ()) -> None:
            authority.issue(folder / name, role=role, id=name, hosts=hosts, now=now, days=DAYS)

        sign(Role.ETCD, "etcd", etcd_hosts)
        sign(Role.COORDINATOR, "observer")
        sign(Role.OPERATOR, "operator")
        for name, host in coordinators.items():
            sign(Role.COORDINATOR, name, [host])
        for name in members:
            sign(Role.MEMBER, name)
        certificates = cls(folder)
        for name in coordinators:
            (folder / name / "etcd.toml").write_text(certificates._etcd_table(name))
        return certificates

    @property
    def etcd(self) -> EtcdTls:
        """Certificate of the etcd members, and the CA by which they verify clients."""
        return EtcdTls(cert=self._file("etcd", CERT), key=self._file("etcd", KEY), ca=self._file("etcd", CA))

    @property
    def observer(self) -> TlsConfig:
        """TLS settings with which the observer and the nemesis connect to etcd."""
        ca, cert, key = (self._file("observer", file) for file in (CA, CERT, KEY))
        return TlsConfig(ca_file=ca, cert_file=cert, key_file=key)

    @property
    def operator(self) -> Credentials:
        """Credentials with which the harness calls coordinators."""
        ca, cert, key = (self._file("operator", file) for file in (CA, CERT, KEY))
        return Credentials(ca_file=ca, cert_file=cert, key_file=key)

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variable from which workloads find their certificates."""
        return {CERTIFICATES: str(self.folder)}

    def options(self, coordinator: str) -> list[str]:
        """Return the flags with which a coordinator uses its certificate for serving and for connecting."""
        return [
            f"--tls-ca-file={self._file(coordinator, CA)}",
            f"--tls-cert-file={self._file(coordinator, CERT)}",
            f"--tls-key-file={self._file(coordinator, KEY)}",
            f"--config={self._file(coordinator, 'etcd.toml')}",
        ]

    def _etcd_table(self, name: str) -> str:
        lines = [
            f'{key} = "{self._file(name, file)}"'
            for key, file in (("ca_file", CA), ("cert_file", CERT), ("key_file", KEY))
        ]
        return "\n".join(["[etcd]", *lines, ""])

    def _file(self, name: str, file: str) -> Path:
        return self.folder.absolute() / name / file
