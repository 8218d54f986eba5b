"""The certificate authority: its files, its refusals, and the contents of its certificates."""

from __future__ import annotations

import base64
import datetime as dt
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from strata.core.access.authority import Identity, Role
from strata.errors import ConfigError
from strata.security.certificates import Authority, describe
from strata.security.dates import validity

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)
KEY = ec.generate_private_key(ec.SECP256R1())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", cluster="c", now=NOW)


def test_keys_and_folders_are_private(authority: Authority, tmp_path: Path) -> None:
    authority.issue(tmp_path / "leaf", role=Role.MEMBER, id="w1", now=NOW)
    assert [mode(tmp_path / f) for f in ("ca", "leaf")] == [0o700, 0o700]
    assert [mode(tmp_path / f) for f in ("ca/ca-key.pem", "leaf/key.pem")] == [0o600, 0o600]
    assert sorted(p.name for p in (tmp_path / "leaf").iterdir()) == ["ca.pem", "cert.pem", "key.pem"]


def test_a_certificate_states_its_identity_hosts_and_expiry(authority: Authority, tmp_path: Path) -> None:
    out = tmp_path / "leaf"
    authority.issue(
        out, role=Role.COORDINATOR, id="c1", hosts=["host1", "10.0.0.1", "[fd00::1]"], now=NOW, days=30
    )
    found = describe(out / "cert.pem")
    assert found.identity == Identity(cluster="c", role=Role.COORDINATOR, id="c1")
    assert set(found.hosts) == {"localhost", "127.0.0.1", "::1", "host1", "10.0.0.1", "fd00::1"}
    assert found.not_after == NOW + 30 * DAY
    assert found.days_left(NOW) == 30


def test_only_serving_roles_get_the_hosts_of_this_machine(authority: Authority, tmp_path: Path) -> None:
    assert authority.issue(tmp_path / "m", role=Role.MEMBER, id="w1", now=NOW).hosts == ()


def test_a_chain_holds_and_the_key_fits(authority: Authority, tmp_path: Path) -> None:
    out = tmp_path / "leaf"
    authority.issue(out, role=Role.ETCD, id="e1", now=NOW)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(out / "ca.pem")
    context.load_cert_chain(out / "cert.pem", out / "key.pem")
    leaf = x509.load_pem_x509_certificate((out / "cert.pem").read_bytes())
    leaf.verify_directly_issued_by(authority.certificate)


def test_nothing_is_overwritten_without_force(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already holds") as error:
        Authority.create(tmp_path / "ca", cluster="c", now=NOW)
    assert "--force" in error.value.hint
    out = tmp_path / "leaf"
    first = authority.issue(out, role=Role.MEMBER, id="w1", now=NOW)
    with pytest.raises(ConfigError, match="already holds"):
        authority.issue(out, role=Role.MEMBER, id="w2", now=NOW)
    assert describe(out / "cert.pem") == first
    second = authority.issue(out, role=Role.MEMBER, id="w2", now=NOW, force=True)
    assert describe(out / "cert.pem") == second != first


def test_a_renewed_certificate_keeps_its_identity_and_gets_a_new_key(
    authority: Authority, tmp_path: Path
) -> None:
    out = tmp_path / "leaf"
    old = authority.issue(out, role=Role.MEMBER, id="w1", hosts=["h"], jobs=["gpt"], now=NOW, days=30)
    key = (out / "key.pem").read_bytes()
    new = Authority.open(tmp_path / "ca").renew(out, now=NOW + 20 * DAY)
    assert (new.identity, new.hosts) == (old.identity, old.hosts)
    assert new.not_after == old.not_after + 20 * DAY
    assert (out / "key.pem").read_bytes() != key


def test_a_renewal_by_a_new_authority_leaves_the_old_one_trusted(
    authority: Authority, tmp_path: Path
) -> None:
    out, old = tmp_path / "leaf", (tmp_path / "ca/ca.pem").read_text()
    authority.issue(out, role=Role.MEMBER, id="w1", now=NOW)
    newer = Authority.create(tmp_path / "ca2", cluster="c", now=NOW)
    both = old + (tmp_path / "ca2/ca.pem").read_text()
    (out / "ca.pem").write_text(both)
    newer.renew(out, now=NOW)
    assert (out / "ca.pem").read_text() == both
    (out / "ca.pem").write_text(old)
    newer.renew(out, now=NOW)
    assert (out / "ca.pem").read_text() == (tmp_path / "ca2/ca.pem").read_text()


def test_a_certificate_expires_no_later_than_its_authority(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca", cluster="c", now=NOW, days=10)
    made = authority.issue(tmp_path / "leaf", role=Role.MEMBER, id="w1", now=NOW, days=100)
    assert made.not_after == NOW + 10 * DAY
    with pytest.raises(ConfigError, match="expired on 2026-03-11"):
        authority.issue(tmp_path / "late", role=Role.MEMBER, id="w1", now=NOW + 11 * DAY)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"id": "a/b"}, "cannot name"),
        ({"hosts": ["host:50051"]}, "not a host"),
        ({"hosts": ["https://h"]}, "not a host"),
        ({"hosts": ["naïve"]}, "not a host"),
        ({"jobs": [""]}, "cannot name a job"),
        ({"days": 0}, "0 days"),
        ({"days": float("nan")}, "nan days"),
        ({"role": Role.COORDINATOR, "jobs": ["j"]}, "belongs to no job"),
    ],
)
def test_an_invalid_certificate_request_is_refused(
    authority: Authority, tmp_path: Path, given: dict[str, object], why: str
) -> None:
    whole: dict[str, object] = {"role": Role.MEMBER, "id": "w1", "now": NOW, **given}
    with pytest.raises(ConfigError, match=why):
        authority.issue(tmp_path / "leaf", **whole)  # type: ignore[arg-type]  # one of the arguments is wrong on purpose
    assert not (tmp_path / "leaf").exists()


def test_a_folder_without_an_authority_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no authority") as error:
        Authority.open(tmp_path)
    assert "strata certs ca" in error.value.hint


def test_an_authority_with_another_s_key_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", cluster="c", now=NOW)
    (authority.folder / "ca-key.pem").write_bytes((other.folder / "ca-key.pem").read_bytes())
    with pytest.raises(ConfigError, match="is not the key of"):
        Authority.open(authority.folder)


# -- dates without a library


@given(
    start=st.datetimes(dt.datetime(1951, 1, 1), dt.datetime(2200, 1, 1)).map(  # noqa: DTZ001  # naive by contract
        lambda d: d.replace(microsecond=0, tzinfo=dt.UTC)
    ),
    days=st.integers(1, 30000),
)
def test_the_dates_are_those_that_a_library_reads(start: dt.datetime, days: int) -> None:
    end = start + days * DAY
    name = x509.Name([])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(KEY.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(end)
        .sign(KEY, hashes.SHA256())
    )
    found = validity(certificate.public_bytes(serialization.Encoding.PEM))
    assert (found.start, found.end) == (start, end)
    assert not found.complaint(start)
    assert not found.complaint(end)
    assert f"{end:%Y-%m-%d}" in found.complaint(end + DAY)
    assert "not valid before" in found.complaint(start - DAY)


@given(st.binary(max_size=200))
def test_an_invalid_certificate_is_reported(body: bytes) -> None:
    for pem in (
        body,
        b"-----BEGIN CERTIFICATE-----\n" + base64.b64encode(body) + b"\n-----END CERTIFICATE-----\n",
    ):
        with pytest.raises(ConfigError, match="not a certificate"):
            validity(pem)
