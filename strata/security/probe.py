"""Why a connection did not come about, in words: asked only after gRPC has failed.

gRPC says "Socket closed" for a certificate that the server refuses, for plaintext sent to a TLS
port, and for a server that died. Here the same handshake is made once more with Python's own TLS,
which tells them apart. What it finds is a `ConfigError` only where it proves a wrong set-up: a
session ends with one, and losing a coordinator must end none.
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
    """Return what is wrong between this side and `host`, or None where nothing can be proved."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not tls:
        if await _speaks_tls(host, port):
            return ConfigError(
                f"{where} speaks TLS, and we were told to speak plaintext",
                hint="set tls.ca_file (--tls-ca-file), or write https:// before the endpoint",
            )
        return None
    try:
        context = _context(credentials)
    except (ssl.SSLError, OSError):
        return None  # the files changed just now; who reads them next says what is wrong
    try:
        if not await _is_turned_away(host, port, context):
            return None
        if not await _is_turned_away(host, port, context):
            return None  # it was about to end, or is back
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
            f"{where} wants a certificate, and we have none",
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
    """Name what is wrong with the server's certificate; its dates with the day."""
    pem = await certificate_of(host, port)
    if pem and (complaint := validity(pem).complaint(now)):
        return ConfigError(
            f"the certificate of {where} {complaint}", hint="strata certs renew, on the server's side"
        )
    said = error.verify_message or "it could not be verified"
    if "ostname mismatch" in said or "IP address mismatch" in said:
        return ConfigError(
            f"the certificate of {where} is not for that name: {said.rstrip('.')}",
            hint="issue it with --host for every name and address that is connected to",
        )
    return ConfigError(
        f"the certificate of {where} is not signed by our authority: {said}",
        hint="tls.ca_file must be the authority that signed the server's certificate",
    )


def _context(credentials: Credentials) -> ssl.SSLContext:
    for path in (credentials.ca_file, credentials.cert_file, credentials.key_file):
        if path is not None:
            read_config(path)  # OpenSSL would wait for a pipe
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
    """A context that believes everybody: it looks, and sends nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def _is_turned_away(host: str, port: int, context: ssl.SSLContext) -> bool:
    """Make the handshake; tell whether the server then ends the connection without a word.

    A gRPC server speaks first, so one that accepts us says something. Raises what the handshake
    raises.
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
    """Return the certificate that a server shows, in PEM form, whoever signed it; nothing if it shows none."""
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
