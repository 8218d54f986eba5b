"""A file of authorities counts only if the transport's library accepts it too."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from strata.core.access.authority import Role
from strata.errors import ConfigError, Unauthenticated
from strata.security.certificates import Authority
from strata.security.trust import Authorities
from tests.secured_fixtures import NOW, issued


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def chain(authority: Authority, folder: Path) -> bytes:
    made = issued(authority, folder, Role.MEMBER, "w")
    assert made.cert_file is not None
    return made.cert_file.read_bytes()


def test_a_file_that_is_half_written_leaves_the_authorities_as_they_were(tmp_path: Path) -> None:
    """Only the first of two certificates is complete. Taken alone, it would reject all peers of the second authority."""
    old = Authority.create(tmp_path / "old", cluster="default", now=NOW)
    new = Authority.create(tmp_path / "new", cluster="default", now=NOW)
    first, second = chain(old, tmp_path / "w"), chain(new, tmp_path / "v")
    file = tmp_path / "ca.pem"
    old_pem, new_pem = ((tmp_path / name / "ca.pem").read_bytes() for name in ("old", "new"))
    file.write_bytes(old_pem)
    authorities = Authorities(file, now=now)
    with capture_logs() as logs:
        file.write_bytes(new_pem + old_pem[: len(old_pem) // 2])
        for _ in range(3):
            authorities.check(first)
            with pytest.raises(Unauthenticated, match="does not accept any more"):
                authorities.check(second)
    assert [line["event"] for line in logs] == ["authorities_not_loaded"], "once"
    assert str(file) in logs[0]["error"]
    file.write_bytes(new_pem + old_pem)
    authorities.check(first)
    authorities.check(second)
    with capture_logs() as logs:
        file.unlink()
        for _ in range(3):
            authorities.check(first)
    assert [line["event"] for line in logs] == ["authorities_not_loaded"]
    file.write_bytes(new_pem)
    with pytest.raises(Unauthenticated, match="does not accept any more"):
        authorities.check(first)


def test_a_file_that_cannot_be_used_at_the_start_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n")
    with pytest.raises(ConfigError, match=r"ca\.pem holds no certificate"):
        Authorities(file, now=now)
