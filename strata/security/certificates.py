"""A small certificate authority: its key, and the certificates that it signs.

    <ca folder>/    ca.pem ca-key.pem cluster
    <leaf folder>/  cert.pem key.pem ca.pem

Only the owner can read the keys and enter the folders. A leaf certificate names its identity as a URI
(`strata.core.access.authority`). A server's certificate also names the server's hosts. Keys are ECDSA P-256.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from strata.core.access.authority import SCHEME, Identity, Role, parse_identity
from strata.core.ids import checked_id
from strata.documents.reading import MAX_PEM_BYTES, read_config, read_regular
from strata.errors import ConfigError, InvalidArgument, StrataError
from strata.security.private import private_folder, write_private, write_public

CA, CA_KEY, CERT, KEY, CLUSTER = "ca.pem", "ca-key.pem", "cert.pem", "key.pem", "cluster"
CA_DAYS: Final = 3650
LEAF_DAYS: Final = 365
SKEW: Final = dt.timedelta(minutes=5)
"""How far another host's clock may be behind the signing host's clock."""
SERVING: Final = frozenset({Role.COORDINATOR, Role.ETCD})

_PEM: Final = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The fields of a certificate that `strata certs show` prints."""

    subject: str
    issuer: str
    serial: str
    authority: bool
    identity: Identity | None
    hosts: tuple[str, ...]
    not_before: dt.datetime
    not_after: dt.datetime
    fingerprint: str

    def days_left(self, now: dt.datetime) -> float:
        """Return the number of days until the certificate expires; negative if it has expired."""
        return (self.not_after - now) / dt.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """An authority on disk; `create` makes one, `open` loads one."""

    folder: Path
    cluster: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(
        cls, folder: Path, *, cluster: str, now: dt.datetime, days: float = CA_DAYS, force: bool = False
    ) -> Authority:
        """Make an authority for `cluster` in `folder`; `force` replaces an existing one.

        Without `force`, raise `ConfigError` if the folder has an authority, because all certificates of that
        authority would be refused.
        """
        _checked("cluster", cluster)
        _check_days(days)
        _refuse_files(folder, (CA, CA_KEY), force, "every certificate it signed would be refused")
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"Strata authority of {cluster}")
        certificate = (
            _builder(name, name, key.public_key(), now, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        private_folder(folder)
        write_private(folder / CA_KEY, _key_pem(key))
        write_public(folder / CA, certificate.public_bytes(_PEM))
        write_public(folder / CLUSTER, f"{cluster}\n".encode())
        return cls(folder=folder, cluster=cluster, certificate=certificate, key=key)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Return the authority in `folder`; `ConfigError` names the missing or invalid file."""
        hint = f"make one: strata certs ca --out {folder} --cluster NAME"
        try:
            certificate = x509.load_pem_x509_certificate(_read(folder / CA))
            key = serialization.load_pem_private_key(_read(folder / CA_KEY), None)
            cluster = _read(folder / CLUSTER).decode().strip()
        except OSError as error:
            raise ConfigError(
                f"{folder} holds no authority: {error.filename}: {error.strerror}", hint=hint
            ) from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{folder} holds no authority: {error}", hint=hint) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{folder / CA_KEY} is not the key of {folder / CA}", hint=hint)
        return cls(folder=folder, cluster=_checked("cluster", cluster), certificate=certificate, key=key)

    def issue(
        self,
        out: Path,
        *,
        role: Role,
        id: str,  # noqa: A002  # named as on the command line and in the URI
        hosts: Iterable[str] = (),
        jobs: Iterable[str] = (),
        now: dt.datetime,
        days: float = LEAF_DAYS,
        force: bool = False,
    ) -> Described:
        """Write `cert.pem`, `key.pem` and `ca.pem` below `out`; `force` replaces existing ones.

        If the role is a server's, the certificate names 127.0.0.1, ::1 and localhost besides `hosts`. Raise
        `ConfigError` for existing files without `force`, for an expired authority, and for an invalid name.
        """
        identity = Identity(
            cluster=self.cluster,
            role=role,
            id=_checked("role's id", id),
            jobs=frozenset(_checked("job", job) for job in jobs),
        )
        if identity.jobs and role in SERVING:
            raise ConfigError(f"a {role} belongs to no job", hint="leave --job out")
        _check_days(days)
        _refuse_files(out, (CERT, KEY), force, "the processes that use them would switch to the new ones")
        if now > self.certificate.not_valid_after_utc:
            raise ConfigError(
                f"the authority in {self.folder} expired on {self.certificate.not_valid_after_utc:%Y-%m-%d}",
                hint=f"make a new one: strata certs ca --out {self.folder} --cluster {self.cluster} --force",
            )
        names = dict.fromkeys((*(("localhost", "127.0.0.1", "::1") if role in SERVING else ()), *hosts))
        alternatives: list[x509.GeneralName] = [_host(name) for name in names]
        uris = (identity.uri, *identity.job_uris)
        alternatives += [x509.UniformResourceIdentifier(uri) for uri in uris]
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role in SERVING:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _builder(
                _name(f"{role}:{id}"),
                self.certificate.subject,
                key.public_key(),
                now,
                days,
                latest=self.certificate.not_valid_after_utc,
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(issuer_key, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        private_folder(out)
        # A process that reads between two of these writes finds a pair that does not match, and reads both files
        # again. Each single file is always complete.
        write_private(out / KEY, _key_pem(key))
        write_public(out / CERT, certificate.public_bytes(_PEM))
        if not self._is_trusted_by(out / CA):
            write_public(out / CA, self.certificate.public_bytes(_PEM))
        return _described(certificate)

    def _is_trusted_by(self, path: Path) -> bool:
        """Return whether a file of authorities contains this authority; the user may have added others on purpose."""
        try:
            return self.certificate in x509.load_pem_x509_certificates(_read(path))
        except (OSError, ValueError):
            return False

    def renew(self, out: Path, *, now: dt.datetime, days: float | None = None) -> Described:
        """Replace the certificate in `out` by a new certificate and key for the same identity and hosts.

        If `ca.pem` contains this authority, that file stays unchanged: it may contain two authorities while one
        replaces the other. Without `days` the new certificate is valid for the same period as the old one.
        """
        old = describe(out / CERT)
        if old.identity is None or old.identity.cluster != self.cluster:
            raise ConfigError(
                f"{out / CERT} is no certificate of cluster {self.cluster}",
                hint="make one with strata certs issue",
            )
        span = (old.not_after - old.not_before - SKEW) / dt.timedelta(days=1)
        return self.issue(
            out,
            role=old.identity.role,
            id=old.identity.id,
            hosts=old.hosts,
            jobs=old.identity.jobs,
            now=now,
            days=span if days is None else days,
            force=True,
        )


def _read(path: Path) -> bytes:
    return read_regular(path, most_bytes=MAX_PEM_BYTES)


def describe(path: Path) -> Described:
    """Return the fields of the first certificate in a file; `ConfigError` if there is none."""
    try:
        return _described(x509.load_pem_x509_certificate(read_config(path)))
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate in PEM form: {error}") from None


def _described(certificate: x509.Certificate) -> Described:
    hosts: list[str] = []
    uris: list[str] = []
    authority = False
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            hosts += extension.value.get_values_for_type(x509.DNSName)
            hosts += [str(ip) for ip in extension.value.get_values_for_type(x509.IPAddress)]
            uris += extension.value.get_values_for_type(x509.UniformResourceIdentifier)
        elif isinstance(extension.value, x509.BasicConstraints):
            authority = extension.value.ca
    identity = None
    if any(uri.lower().startswith(f"{SCHEME}:") for uri in uris):
        try:
            identity = parse_identity(uris)
        except StrataError as error:
            raise ConfigError(error.message, hint=error.hint) from None
    return Described(
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        serial=f"{certificate.serial_number:x}",
        authority=authority,
        identity=identity,
        hosts=tuple(hosts),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


# -- building certificates --------------------------------------------------------------------


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: dt.datetime,
    days: float,
    *,
    latest: dt.datetime | None = None,
) -> x509.CertificateBuilder:
    """Return a builder. A leaf expires no later than its authority, because it would be refused after its
    authority has expired.
    """
    end = now + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(end if latest is None else min(end, latest))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        pass
    if not name or not name.isascii() or any(c.isspace() or c in "/:,@" for c in name):
        raise ConfigError(
            f"{name!r} is not a host's name or address", hint="--host takes one name or address, no port"
        )
    return x509.DNSName(name)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain)


def _checked(what: str, value: str) -> str:
    try:
        return checked_id(what, value)
    except InvalidArgument as error:
        raise ConfigError(error.message, hint=error.hint) from None


def _check_days(days: float) -> None:
    if not 0 < days <= 36500:
        raise ConfigError(f"a certificate cannot be valid for {days:g} days", hint="--days takes 1 to 36500")


def _refuse_files(folder: Path, names: Iterable[str], force: bool, why: str) -> None:
    there = [name for name in names if os.path.lexists(folder / name)]
    if there and not force:
        raise ConfigError(
            f"{folder} already holds {' and '.join(there)}: {why}", hint="pass --force to replace"
        )
