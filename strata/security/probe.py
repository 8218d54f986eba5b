"""Diagnosis of a failed connection: after gRPC has failed, find out why the TLS handshake failed.

gRPC reports "Socket closed" for a certificate that the server refuses, for plaintext sent to a TLS port, and for a
server that died. This module repeats the handshake with Python's own TLS, which distinguishes these causes. The
module returns a `ConfigError` only if the handshake proves a wrong configuration, because a `ConfigError` ends a
session. The loss of a coordinator must not end a session.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from typing import Final

from strata.config import Credentials
from strata.documents.reading import read_config
from strata.errors import ConfigError, StrataError, Unauthenticated
from strata.security.dates import validity

LIMIT_S: Final = 1.0
_DOCS: Final = "see docs/security.md"


async def explain(
    host: str, port: int, credentials: Credentials, *, tls: bool, now: dt.datetime
) -> StrataError | None:
    """Return the error in the server's or our configuration that a handshake with `host` proves, or None."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not tls:
        if await _speaks_tls(host, port):
            return ConfigError(
                f"{where} speaks TLS, and plaintext is configured",
                hint="set tls.ca_file (--tls-ca-file), or write https:// before the endpoint",
            )
        return None
    try:
        context = _context(credentials)
    except (ssl.SSLError, OSError):
        return None  # the files are being replaced; the next connection reports an error that remains
    try:
        if not await _is_refused(host, port, context):
            return None
        if not await _is_refused(host, port, context):
            return None  # the server was shutting down, or has restarted
    except ssl.SSLCertVerificationError as error:
        return await _unverified(where, host, port, error, now)
    except ssl.SSLError as error:
        return _unspoken(where, error, credentials)
    except (OSError, TimeoutError):
        return None
    return _refused(where, credentials)


def _refused(where: str, credentials: Credentials) -> StrataError:
    if credentials.cert_file is None:
        return Unauthenticated(
            f"{where} requires a client certificate, and we have none",
            hint="set tls.cert_file and tls.key_file (--tls-cert-file, --tls-key-file)",
        )
    return Unauthenticated(
        f"{where} does not accept our certificate {credentials.cert_file}",
        hint="it must be signed by the authority in the server's tls.ca_file: strata certs show"
        f" {credentials.cert_file}",
    )


def _unspoken(where: str, error: ssl.SSLError, credentials: Credentials) -> StrataError | None:
    reason = error.reason or ""
    if reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"}:
        return ConfigError(
            f"{where} does not speak TLS",
            hint="write http:// before the endpoint for plaintext, or give the server a certificate",
        )
    if "ALERT" in reason and ("CERT" in reason or "UNKNOWN_CA" in reason):
        return _refused(where, credentials)
    return ConfigError(
        f"the TLS handshake with {where} failed: {reason.replace('_', ' ').lower()}", hint=_DOCS
    )


async def _unverified(
    where: str, host: str, port: int, error: ssl.SSLCertVerificationError, now: dt.datetime
) -> StrataError:
    """Return the error of the server's certificate, with the date of expiry if the certificate has expired."""
    pem = await certificate_of(host, port)
    if pem and (complaint := validity(pem).complaint(now)):
        return ConfigError(
            f"the certificate of {where} {complaint}", hint="strata certs renew, on the server's side"
        )
    reason = error.verify_message or "it could not be verified"
    if "ostname mismatch" in reason or "IP address mismatch" in reason:
        return ConfigError(
            f"the certificate of {where} is not for that name: {reason.rstrip('.')}",
            hint="issue it with --host for every name and address that is connected to",
        )
    return ConfigError(
        f"the certificate of {where} is not signed by our authority: {reason}",
        hint="tls.ca_file must be the authority that signed the server's certificate",
    )


def _context(credentials: Credentials) -> ssl.SSLContext:
    for path in (credentials.ca_file, credentials.cert_file, credentials.key_file):
        if path is not None:
            read_config(path)  # refuses a pipe, on which OpenSSL would block
    if credentials.ca_file is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(credentials.ca_file)
    if credentials.cert_file is not None and credentials.key_file is not None:
        context.load_cert_chain(credentials.cert_file, credentials.key_file, password=lambda: "")
    context.set_alpn_protocols(["h2"])
    return context


def _trusting() -> ssl.SSLContext:
    """Return a context that verifies no certificate. It is only used to inspect a server, and sends no data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def _is_refused(host: str, port: int, context: ssl.SSLContext) -> bool:
    """Complete the handshake; return whether the server then closes the connection without sending anything.

    A gRPC server sends first, so a server that accepts our certificate sends something. Raise the handshake's errors.
    """
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    try:
        async with asyncio.timeout(LIMIT_S):
            return not await reader.read(1)
    except (ConnectionError, TimeoutError):
        return False
    finally:
        writer.transport.abort()


async def _speaks_tls(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(LIMIT_S):
            _reader, writer = await asyncio.open_connection(host, port, ssl=_trusting(), server_hostname=host)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


async def certificate_of(host: str, port: int, *, limit_s: float = LIMIT_S) -> bytes:
    """Return, unverified, the certificate that a server presents, as PEM; empty if it presents none."""
    try:
        async with asyncio.timeout(limit_s):
            _reader, writer = await asyncio.open_connection(host, port, ssl=_trusting(), server_hostname=host)
    except (OSError, TimeoutError):
        return b""
    try:
        shown: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
        der = shown.getpeercert(binary_form=True) if shown is not None else None
        return ssl.DER_cert_to_PEM_cert(der).encode() if der else b""
    finally:
        writer.transport.abort()
