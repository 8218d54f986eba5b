"""TLS context of the HTTP port; the certificate is read again at the first handshake after the files change."""

from __future__ import annotations

import ssl
from pathlib import Path

from strata.documents.reading import read_config
from strata.errors import ConfigError
from strata.observe import get_logger

log = get_logger()


def server_context(cert_file: Path, key_file: Path, ca_file: Path | None) -> ssl.SSLContext:
    """Return a context that presents, at each handshake, the certificate that the files then contain.

    With `ca_file` a client may present a certificate; the handshake fails if no authority in that file signed it.

    Raise `ConfigError` if the files do not contain a certificate and its key now. If reading fails later, the
    failure is logged, and the last valid certificate stays in use.
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
        read_config(path)  # refuses a pipe, on which OpenSSL would block
    try:
        context.load_cert_chain(cert_file, key_file)
        if ca_file is not None:
            context.load_verify_locations(ca_file)
            context.verify_mode = ssl.CERT_OPTIONAL
    except OSError as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"cannot use {cert_file} with {key_file}: {error}") from None
    return context


def _stamps(*files: Path) -> tuple[int, ...]:
    """Return the modification time of each file in ns; 0 for a missing one."""
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
