"""A certificate's validity period, read without a cryptographic library.

The base install has no such library. A trainer with an expired certificate must report the date before it attempts a
handshake, because the handshake would fail without a reason.
"""

from __future__ import annotations

import datetime as dt
import re
import ssl
from dataclasses import dataclass
from typing import Final

from strata.errors import ConfigError

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE: Final = 0x30
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_VERSION: Final = 0xA0


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """A certificate is valid from `start` to `end`, both included, both in UTC."""

    start: dt.datetime
    end: dt.datetime

    def complaint(self, now: dt.datetime) -> str:
        """Return why a certificate is not valid now; "" if it is."""
        if now > self.end:
            return f"expired on {self.end:%Y-%m-%d %H:%M:%SZ}"
        if now < self.start:
            return f"is not valid before {self.start:%Y-%m-%d %H:%M:%SZ}; this host's clock says {now:%Y-%m-%d %H:%M:%SZ}"
        return ""


def validity(pem: bytes) -> Validity:
    """Return the validity of the first certificate in `pem`; raise `ConfigError` if there is none."""
    try:
        found = _PEM.search(pem.decode("ascii", errors="replace"))
        if found is None:
            raise ValueError("there is no BEGIN CERTIFICATE")
        return _validity(ssl.PEM_cert_to_DER_cert(found[0]))
    except (ValueError, IndexError) as error:
        raise ConfigError(f"not a certificate in PEM form: {error}") from None


def validities(pem: bytes) -> list[Validity]:
    """Return the validity of every certificate in `pem`; raise `ConfigError` if any is invalid or there is none."""
    found = _PEM.findall(pem.decode("ascii", errors="replace"))
    return [validity(each.encode()) for each in found] or [validity(pem)]


def _validity(der: bytes) -> Validity:
    """Return the validity field of Certificate > TBSCertificate (RFC 5280, 4.1)."""
    _tag, certificate, _rest = _element(der)
    _tag, body, _rest = _element(certificate)
    if body[0] == _VERSION:
        _tag, _version, body = _element(body)
    for _skipped in ("serialNumber", "signature", "issuer"):
        _tag, _value, body = _element(body)
    tag, dates, _rest = _element(body)
    if tag != _SEQUENCE:
        raise ValueError("the dates are not where they should be")
    start_tag, start, rest = _element(dates)
    end_tag, end, _rest = _element(rest)
    return Validity(start=_time(start_tag, start), end=_time(end_tag, end))


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Return tag and content of the first DER element, and the data after it."""
    tag, size, at = data[0], data[1], 2
    if size & 0x80:
        count = size & 0x7F
        if not 1 <= count <= 4:
            raise ValueError("a length that DER does not have")
        size, at = int.from_bytes(data[2 : 2 + count]), 2 + count
    if at + size > len(data):
        raise ValueError("it is cut short")
    return tag, data[at : at + size], data[at + size :]


def _time(tag: int, text: bytes) -> dt.datetime:
    forms = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
    if tag not in forms:
        raise ValueError("a date in an unknown form")
    found = dt.datetime.strptime(text.decode("ascii"), forms[tag]).replace(tzinfo=dt.UTC)
    if tag == _UTC_TIME and found.year >= 2050:  # RFC 5280: 50 to 99 mean 1950 to 1999
        return found.replace(year=found.year - 100)
    return found
