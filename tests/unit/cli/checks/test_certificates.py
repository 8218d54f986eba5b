"""The findings of `strata doctor` on certificates by their remaining days, and the printed command to renew them."""

from __future__ import annotations

import datetime as dt
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.cli.app import assembled
from strata.cli.checks import certificates
from strata.cli.checks.finding import Finding
from strata.config import Credentials
from strata.core.access.authority import Role
from strata.security.certificates import Authority

NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


def made(folder: Path, *, left: float, ca_left: float = 3650) -> Credentials:
    """Make an authority and, beside it, a certificate that expires in `left` days."""
    authority = Authority.create(folder / "ca", cluster="c", now=NOW - 400 * DAY, days=400 + ca_left)
    out = folder / "node-1"
    authority.issue(out, role=Role.MEMBER, id="node-1", now=NOW - 365 * DAY, days=365 + left)
    return Credentials(ca_file=out / "ca.pem", cert_file=out / "cert.pem", key_file=out / "key.pem")


def found(credentials: Credentials) -> dict[str, Finding]:
    return {finding.what: finding for finding in certificates.credentials(credentials)}


@pytest.mark.parametrize(
    ("left", "ca_left", "level", "printed", "ca_level", "ca_error"),
    [
        (300, 3650, "OK", "300 days left", "OK", "3650 days left"),
        (29, 3650, "WARN", "29 days left", "OK", "left"),
        (0.5, 3650, "WARN", "hours left", "OK", "left"),
        (-5, 3650, "FAIL", "expired on", "OK", "left"),
        (300, 20, "WARN", "20 days left", "WARN", "20 days left"),
        (300, -2, "FAIL", "expired on", "FAIL", "expired on"),
    ],
)
def test_a_certificate_is_judged_by_the_days_that_are_left(
    tmp_path: Path, left: float, ca_left: float, level: str, printed: str, ca_level: str, ca_error: str
) -> None:
    findings = found(made(tmp_path, left=left, ca_left=ca_left))
    own, authority = findings["tls"], findings["tls authority"]
    assert (own.level, authority.level) == (level, ca_level)
    assert printed in own.says
    assert ca_error in authority.says
    line = f"strata certs renew --ca {tmp_path / 'ca'} --out {tmp_path / 'node-1'}"
    assert own.commands == (() if level == "OK" else (line,))
    assert ("both" in authority.hint) is (ca_level != "OK")


def test_the_line_that_is_printed_renews_it(tmp_path: Path) -> None:
    mine = made(tmp_path, left=-5)
    (line,) = found(mine)["tls"].commands
    result = CliRunner().invoke(assembled("certs"), shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert found(mine)["tls"].level == "OK"


def test_an_authority_that_is_not_here_is_a_placeholder_in_the_renew_command(tmp_path: Path) -> None:
    mine = made(tmp_path / "there", left=5)
    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "node-1").rename(tmp_path / "here" / "node-1")
    here = tmp_path / "here" / "node-1"
    moved = Credentials(ca_file=here / "ca.pem", cert_file=here / "cert.pem", key_file=here / "key.pem")
    finding = found(moved)["tls"]
    assert mine.cert_file != moved.cert_file
    assert finding.commands == (f"strata certs renew --ca CA --out {here}",)
    assert "in the place of CA" in finding.hint


@pytest.mark.parametrize(
    ("first", "second", "level"),
    [(300, 3000, "OK"), (20, 3000, "WARN"), (-2, 3000, "WARN"), (-9, -2, "FAIL")],
)
def test_of_two_authorities_the_one_that_expires_first_is_reported(
    tmp_path: Path, first: float, second: float, level: str
) -> None:
    both = b""
    for name, left in (("a", first), ("b", second)):
        Authority.create(tmp_path / name, cluster="c", now=NOW - 400 * DAY, days=400 + left)
        both += (tmp_path / name / "ca.pem").read_bytes()
    (tmp_path / "ca.pem").write_bytes(both)
    finding = found(Credentials(ca_file=tmp_path / "ca.pem"))["tls authority"]
    assert finding.level == level
    assert "the first of 2 to end" in finding.says
