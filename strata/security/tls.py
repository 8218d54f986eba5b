"""The PEM files of one side of a connection, read for each connection, so that they may be replaced.

A certificate and its key are two files, which are replaced one after the other. Files that are read between the two
replacements do not match, and are read again.
"""

from __future__ import annotations

import datetime as dt
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from strata.config import Credentials
from strata.documents.reading import read_config
from strata.errors import ConfigError
from strata.security.dates import validity
from strata.security.private import read_private

_TRIES: Final = 5
_PAUSE_S: Final = 0.01

Stamp = tuple[tuple[int, int, int], ...]
"""Inode, modification time and size of each file, which change when a file is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pem:
    """The content of the files. None: the file is not configured."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


def read_pem(credentials: Credentials, now: dt.datetime) -> Pem:
    """Return the content of the files of `credentials`.

    Raise `ConfigError` for a file that cannot be read, a key that others can read, a key of another certificate, or a
    certificate that has expired or is not valid yet.
    """
    if credentials.ca_file is not None:
        check_authorities(credentials.ca_file)
    pem = Pem()
    for left in reversed(range(_TRIES)):
        before = stamp_of(credentials)
        pem = Pem(
            ca=_read(credentials.ca_file), cert=_read(credentials.cert_file), key=_read_key(credentials)
        )
        try:
            _check_pair(credentials)
        except ConfigError:
            if not left:
                raise
        else:
            if stamp_of(credentials) == before:
                break
        time.sleep(_PAUSE_S)
    if pem.cert is not None and (complaint := validity(pem.cert).complaint(now)):
        raise ConfigError(
            f"our certificate {credentials.cert_file} {complaint}",
            hint=f"strata certs renew --ca <the authority's folder> --out {_folder(credentials.cert_file)}",
        )
    return pem


def stamp_of(credentials: Credentials) -> Stamp:
    """Return the stamp of the files of `credentials`."""
    return stamp(credentials.ca_file, credentials.cert_file, credentials.key_file)


def stamp(*paths: Path | None) -> Stamp:
    """Return a stamp that changes if a file is replaced; a missing file counts as zeros."""
    found = []
    for path in paths:
        if path is None:
            continue
        try:
            info = path.stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((info.st_ino, info.st_mtime_ns, info.st_size))
    return tuple(found)


def check_authorities(path: Path) -> None:
    """Raise `ConfigError` unless a TLS library, such as the transport's, can load the whole file of authorities."""
    read_config(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"tls.ca_file {path} holds no certificate in PEM form: {_text_of(error)}") from None


def _check_pair(credentials: Credentials) -> None:
    if credentials.cert_file is None or credentials.key_file is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(
            credentials.cert_file, credentials.key_file, password=_no_password
        )
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"{credentials.cert_file} and {credentials.key_file} are no certificate and its key:"
            f" {_text_of(error)}",
            hint="both come from one `strata certs issue`",
        ) from None


def _no_password() -> str:
    """Refuse a key with a password, because OpenSSL would prompt for the password on the terminal."""
    raise ValueError("the key has a password; Strata reads keys without one")


def _text_of(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else str(error)


def _read(path: Path | None) -> bytes | None:
    return None if path is None else read_config(path)


def _read_key(credentials: Credentials) -> bytes | None:
    return None if credentials.key_file is None else read_private(credentials.key_file, "tls.key_file")


def _folder(path: Path | None) -> Path:
    return path.parent if path is not None else Path()
