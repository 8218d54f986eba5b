"""Re-verification of a peer's certificate after the handshake: whether a handshake would accept it now.

The transport verifies once, at the handshake, that the peer has the key and that one of our authorities signed the
certificate. Later the certificate may expire, or the file of authorities may be replaced. This module checks the
certificate against the current file and clock. The check must not be used for a peer that has not completed a
handshake, because it does not prove that the peer has the key.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from strata.documents.reading import read_config
from strata.errors import ConfigError, Unauthenticated
from strata.observe import get_logger
from strata.security.tls import Stamp, check_authorities, stamp

log = get_logger()

MAX_KNOWN: Final = 10_000
"""The number of certificate chains whose result is cached."""
MAX_DEPTH: Final = 8
"""The greatest number of certificates between a certificate and its authority."""


class Authorities:
    """The authorities in a file; a replaced file is read again.

    Raise `ConfigError` if the first version of the file cannot be used. If a later version cannot be used, the old
    authorities stay in use, as in the transport, and the failure is logged once.
    """

    def __init__(self, path: Path, *, now: Callable[[], dt.datetime]) -> None:
        self._path = path
        self._now = now
        self._stamp = stamp(path)
        self._complaint: tuple[Stamp, str] | None = None
        self._trusted = self._read()
        self._until: dict[bytes, dt.datetime] = {}
        """Chain -> the end of its validity under the current authorities."""

    def check(self, chain: bytes) -> None:
        """Raise `Unauthenticated` unless the first certificate in `chain`, in PEM form, is valid now."""
        self._reload()
        until = self._until.get(chain)
        if until is None:
            until = self._judge(chain)
            if len(self._until) >= MAX_KNOWN:
                self._until.clear()
            self._until[chain] = until
        if self._now() > until:
            raise Unauthenticated(
                f"the certificate expired on {until:%Y-%m-%d %H:%M:%SZ}",
                hint="renew it: strata certs renew; new connections use it",
            )

    def _reload(self) -> None:
        now = stamp(self._path)
        if now == self._stamp:
            return
        try:
            found = self._read()
        except ConfigError as error:
            complaint = (now, error.message)
            if self._complaint != complaint:
                self._complaint = complaint
                log.warning("authorities_not_loaded", error=error.message, hint=error.hint)
            return
        if stamp(self._path) == now:  # otherwise the file was replaced during the reading
            self._stamp, self._trusted, self._complaint = now, found, None
            self._until.clear()

    def _read(self) -> list[x509.Certificate]:
        """Return the authorities in the file.

        If a certificate is truncated, `x509` accepts the certificates before it, but the transport's library rejects
        the whole file. So `check_authorities` reads the file first.
        """
        check_authorities(self._path)
        try:
            return x509.load_pem_x509_certificates(read_config(self._path))
        except ValueError as error:
            raise ConfigError(f"{self._path} holds a certificate that cannot be read: {error}") from None

    def _judge(self, chain: bytes) -> dt.datetime:
        """Return the end of a chain's validity: the earliest end among the certificate and its issuers."""
        shown = x509.load_pem_x509_certificates(chain)
        until = _vouched(shown[0], shown[1:], self._trusted, MAX_DEPTH)
        if until is None:
            raise Unauthenticated(
                "the certificate is of an authority that this cluster does not accept any more",
                hint="issue one of the new authority: strata certs renew",
            )
        return until


def _vouched(
    one: x509.Certificate,
    between: Iterable[x509.Certificate],
    trusted: Iterable[x509.Certificate],
    depth: int,
) -> dt.datetime | None:
    """Return the latest end of validity among the chains from `one` to a trusted certificate; None without a chain."""
    ends = [each.not_valid_after_utc for each in trusted if each == one or _issued(one, each)]
    if depth and not ends:
        for each in between:
            if each != one and _issued(one, each):
                end = _vouched(each, between, trusted, depth - 1)
                ends += [] if end is None else [end]
    return min(one.not_valid_after_utc, max(ends)) if ends else None


def _issued(one: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        one.verify_directly_issued_by(by)
    except (ValueError, InvalidSignature):
        return False
    except (TypeError, UnsupportedAlgorithm):
        return True  # the name matches; only the transport's library can check this kind of key
    return True
