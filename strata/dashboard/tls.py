"""The certificate of the page, read again when its files change: each handshake looks."""

from __future__ import annotations

import ssl
from pathlib import Path

from strata.errors import ConfigError
from strata.observe import get_logger

log = get_logger()


def server_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """Return a context that always proves itself with what the files hold at the time.

    `ConfigError` when they hold no certificate with its key now. Later trouble is logged, and the last
    good ones stay in use.
    """
    current = _loaded(cert_file, key_file)
    seen = _stamps(cert_file, key_file)

    def refreshed(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal current, seen
        stamps = _stamps(cert_file, key_file)
        if stamps != seen:
            seen = stamps
            try:
                current = _loaded(cert_file, key_file)
            except ConfigError as error:
                log.warning("http_certificate_not_renewed", error=error.message)
        connection.context = current

    front = _loaded(cert_file, key_file)
    front.sni_callback = refreshed
    return front


def _loaded(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"cannot use {cert_file} with {key_file}: {error}") from None
    return context


def _stamps(*files: Path) -> tuple[int, ...]:
    """Return when each was changed; 0 for one that is not there."""
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
