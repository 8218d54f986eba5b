"""Certificates for tests: one authority and the certificates that it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from strata.devcluster.etcd_http import EtcdTls
from strata.security.certificates import Authority as StrataAuthority

_LIFE = dt.timedelta(hours=1)
_PEM = serialization.Encoding.PEM


class Authority:
    """A certificate authority that lives for an hour; `ca` is its own certificate's file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        own = self._builder(self._name, self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def issue(self, name: str, *, uris: tuple[str, ...] = ()) -> tuple[Path, Path]:
        """Write a certificate for client and server on loopback; return it and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.IPAddress(ipaddress.ip_address("::1")),
            *(x509.UniformResourceIdentifier(uri) for uri in uris),
        ]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key())
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        cert_file.write_bytes(certificate.public_bytes(_PEM))
        plain = serialization.NoEncryption()
        key_file.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain))
        key_file.chmod(0o600)
        return cert_file, key_file

    def _builder(self, name: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _LIFE)
            .not_valid_after(now + _LIFE)
        )


def etcd_identity(folder: Path) -> EtcdTls:
    """One identity for all members of a cluster and its clients."""
    authority = Authority(folder)
    cert, key = authority.issue("etcd")
    return EtcdTls(cert=cert, key=key, ca=authority.ca)


def signed_by(authority: StrataAuthority, folder: Path, name: str) -> tuple[Path, Path]:
    """Write a certificate signed by an authority of `strata certs` that names no identity."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LIFE)
        .not_valid_after(now + _LIFE)
        .sign(authority.key, hashes.SHA256())
    )
    cert_file, key_file = folder / f"{name}.pem", folder / f"{name}-key.pem"
    cert_file.write_bytes(certificate.public_bytes(_PEM))
    plain = serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain))
    key_file.chmod(0o600)
    return cert_file, key_file
