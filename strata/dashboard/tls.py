"""The certificate of the page, read again when its files change: each handshake looks."""

from __future__ import annotations

import ssl
from pathlib import Path

from strata.documents.reading import read_config
from strata.errors import ConfigError
from strata.observe import get_logger

log = get_logger()


def server_context(cert_file: Path, key_file: Path, ca_file: Path | None) -> ssl.SSLContext:
    """Return a context that always proves itself with what the files hold at the time.

    With `ca_file` a client may show a certificate; one that this authority did not sign is refused.

    `ConfigError` when they hold no certificate with its key now. Later trouble is logged, and the last
    good ones stay in use.
    """
    files = [file for file in (cert_file, key_file, ca_file) if file is not None]
    current = _loaded(cert_file, key_file, ca_file)
    seen = _stamps(*files)

    def refreshed(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal current, seen
        stamps = _stamps(*files)
        if stamps != seen:
            seen = stamps
            try:
                current = _loaded(cert_file, key_file, ca_file)
            except ConfigError as error:
                log.warning("http_certificate_not_renewed", error=error.message)
        connection.context = current

    front = _loaded(cert_file, key_file, ca_file)
    front.sni_callback = refreshed
    return front


def _loaded(cert_file: Path, key_file: Path, ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path in (cert_file, key_file, *([ca_file] if ca_file is not None else [])):
        read_config(path)  # OpenSSL would wait for a pipe
    try:
        context.load_cert_chain(cert_file, key_file)
        if ca_file is not None:
            context.load_verify_locations(ca_file)
            context.verify_mode = ssl.CERT_OPTIONAL
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"cannot use {cert_file} with {key_file}: {error}") from None
    return context


def _stamps(*files: Path) -> tuple[int, ...]:
    """Return when each was changed; 0 for one that is not there."""
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
