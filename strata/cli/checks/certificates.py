"""Checks of certificates and tokens for `strata doctor`: days until they expire, and the command that renews them."""

from __future__ import annotations

import asyncio
import datetime as dt
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from strata.cli.checks.finding import Finding, fail, ok, warn
from strata.client import parse_endpoints
from strata.config import Credentials
from strata.documents.reading import read_config
from strata.errors import ConfigError, StrataError
from strata.security.dates import Validity, validities, validity
from strata.security.probe import certificate_of
from strata.security.tls import read_pem

SOON: Final = dt.timedelta(days=30)
_ON_ITS_HOST: Final = ("strata certs renew --ca CA --out COORDINATOR",)
_CA, _CA_KEY = "ca.pem", "ca-key.pem"
_AUTHORITY: Final = "make a new authority, trust both for a while, and issue all certificates again: docs/operate/expired-certificate.md"


def credentials(given: Credentials, *, what: str = "tls") -> Iterator[Finding]:
    """Check the certificate files and the token, if any are configured."""
    now = dt.datetime.now(dt.UTC)
    if given.wants_tls:
        try:
            pem = read_pem(given, now)
        except StrataError as error:
            command = _expired(given, now)
            yield fail(
                what,
                error.message,
                _where(command)
                if command
                else error.hint or "name the right file, or make one with strata certs",
                *command,
            )
        else:
            if pem.cert is None:
                yield ok(what, f"{given.ca_file} names the trusted authority; this side shows no certificate")
            else:
                assert given.cert_file is not None
                yield of_days(
                    what,
                    str(given.cert_file),
                    validity(pem.cert),
                    now,
                    *renewal(given.cert_file, given.ca_file),
                )
        yield from _authorities(given, now, what=f"{what} authority")
    if given.token_file is not None:
        try:
            read_config(given.token_file)
        except ConfigError as error:
            yield fail("token", error.message, "make one with strata tokens add")
        else:
            yield ok("token", str(given.token_file))


def of_days(what: str, whose: str, counts: Validity, now: dt.datetime, *commands: str) -> Finding:
    """Judge a certificate by the days until it expires."""
    if complaint := counts.complaint(now):
        return fail(what, f"{whose} {complaint}", _where(commands), *commands)
    left = counts.end - now
    says = f"{whose}: {_left(left)} left, until {counts.end:%Y-%m-%d %H:%M:%SZ}"
    if left < SOON:
        return warn(what, says, _where(commands), *commands)
    return ok(what, says)


def renewal(cert_file: Path, ca_file: Path | None) -> tuple[str, ...]:
    """Return the command that renews a certificate made by `strata certs`; nothing unless the file is named cert.pem.

    The command names the authority's folder if it is beside the certificate's folder, as `make-certs` writes the two.
    """
    if cert_file.name != "cert.pem":
        return ()
    folder = cert_file.parent
    authority = _authority_beside(folder, ca_file)
    where = str(authority) if authority is not None else "CA"
    return (shlex.join(["strata", "certs", "renew", "--ca", where, "--out", str(folder)]),)


def _authority_beside(folder: Path, ca_file: Path | None) -> Path | None:
    """Return the folder beside `folder` that has the key of an authority in `ca_file`, or None."""
    if ca_file is None:
        return None
    try:
        trusted = read_config(ca_file)
        for key in sorted(folder.absolute().parent.glob(f"*/{_CA_KEY}")):
            if read_config(key.with_name(_CA)).strip() in trusted:
                return _as_given(folder, key.parent)
    except (OSError, StrataError):
        pass
    return None


def _as_given(folder: Path, found: Path) -> Path:
    """Return `found`, a sibling of `folder`, as a relative path if `folder` is relative."""
    return found if folder.is_absolute() else folder.parent / found.name


def _expired(given: Credentials, now: dt.datetime) -> tuple[str, ...]:
    """Return the command that renews our certificate, if the certificate has expired."""
    try:
        if given.cert_file is None or now <= validity(read_config(given.cert_file)).end:
            return ()
    except StrataError:
        return ()
    return renewal(given.cert_file, given.ca_file)


def _where(commands: tuple[str, ...]) -> str:
    if not commands:
        return "have its issuer make a new one"
    if " --ca CA " in commands[0]:
        return "where the authority's key lies; put its folder in the place of CA, and copy the files here"
    return "nothing has to be restarted: the files are read again for each connection"


def _authorities(given: Credentials, now: dt.datetime, *, what: str) -> Iterator[Finding]:
    """Check the trusted authority that expires first. The expiry is only a warning while another one is valid."""
    if given.ca_file is None:
        return
    try:
        found = validities(read_config(given.ca_file))
    except StrataError as error:
        yield fail(what, error.message, error.hint or "")
        return
    first, last = min(found, key=lambda each: each.end), max(found, key=lambda each: each.end)
    of = f" (the first of {len(found)} to end)" if len(found) > 1 else ""
    finding = of_days(what, f"{given.ca_file}{of}", first if not last.complaint(now) else last, now)
    if finding.level == "FAIL" and not last.complaint(now):
        hint = "it is no longer needed once nothing that it signed is in use: take it out of the file"
        yield warn(what, finding.says, hint)
    elif finding.level == "OK":
        yield finding
    else:
        yield Finding(level=finding.level, what=what, says=finding.says, hint=_AUTHORITY)


def servers(endpoints: str, own: Credentials, *, timeout_s: float) -> Iterator[Finding]:
    """Check the certificate that each coordinator presents to a new connection, if its endpoint uses TLS."""
    try:
        tls_endpoints = [each for each in parse_endpoints(endpoints, own) if each.tls]
    except StrataError:
        return  # `cluster` reports the invalid endpoints
    now = dt.datetime.now(dt.UTC)
    for endpoint in tls_endpoints:
        pem = asyncio.run(certificate_of(endpoint.host, endpoint.port, limit_s=timeout_s))
        if not pem:
            continue  # `cluster` reports endpoints that do not answer
        what = f"server {endpoint}"
        try:
            yield of_days(what, "its certificate", validity(pem), now, *_ON_ITS_HOST)
        except ConfigError as error:
            yield warn(what, error.message, "")


def _left(left: dt.timedelta) -> str:
    days = left / dt.timedelta(days=1)
    return f"{days:.0f} days" if days >= 2 else f"{days * 24:.1f} hours"
