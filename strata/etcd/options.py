"""Options of the etcd client: addresses, certificates, and time limits.

Every time and every source of randomness is a field here, so that a test can replace it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import grpc

from strata.config.coordinator import ETCD_LOGIN, EtcdConfig
from strata.config.userinfo import refuse_userinfo
from strata.documents.reading import read_config
from strata.errors import ConfigError
from strata.security.tls import Stamp, stamp

DEFAULT_PORT: Final = 2379


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files: the CA that etcd's certificate must have, and our own certificate.

    Without `ca_file` the system's CAs are trusted. `server_name` replaces the endpoint's host in the check of etcd's
    certificate.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None

    @classmethod
    def of(cls, config: EtcdConfig) -> TlsConfig | None:
        """Return the TLS files in `config`; None if `config` names none."""
        if config.ca_file is None and config.cert_file is None:
            return None
        return cls(
            ca_file=config.ca_file,
            cert_file=config.cert_file,
            key_file=config.key_file,
            server_name=config.server_name or None,
        )

    def stamp(self) -> Stamp:
        """Return a value that changes when one of the files is replaced."""
        return stamp(self.ca_file, self.cert_file, self.key_file)

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files; `ConfigError` names a file that cannot be read."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("a client certificate for etcd needs both cert_file and key_file")
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file),
            private_key=_read(self.key_file),
            certificate_chain=_read(self.cert_file),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of PROTOCOLS 3, in seconds, and the clock that measures them."""

    request_s: float = 1.0
    """Time limit of one RPC at one endpoint."""
    read_s: float = 10.0
    """Time limit of a read, or of another call that may be repeated, over all endpoints and attempts."""
    connect_s: float = 5.0
    """Time limit from `connect` to the first answer of any endpoint."""
    open_s: float = 3.0
    """Time limit until a new watch is confirmed, and until a blamed endpoint has answered on its watch."""
    progress_s: float = 5.0
    """How often an idle watch requests its progress."""
    silence_s: float = 15.0
    """How long a watch may stay silent before it is opened at another endpoint."""
    backoff_s: float = 0.05
    backoff_cap_s: float = 0.5
    """The maximum pause between attempts that fail immediately: short, so that no pause lasts much longer than an
    election."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    chance: Callable[[], float] = random.random
    """Uniform in [0, 1): for the start of the rotation, and the jitter of every pause."""

    def pause_s(self, failures: int) -> float:
        """Return the pause after that many failures in a row: none after the first."""
        if failures <= 1:
            return 0.0
        ceiling = min(self.backoff_cap_s, self.backoff_s * 2.0 ** min(failures - 2, 16))
        return ceiling * (0.5 + 0.5 * self.chance())


@dataclass(frozen=True, slots=True)
class Address:
    """One endpoint as a gRPC target."""

    target: str
    tls: bool | None
    """Whether the URL's scheme is https; None if it has no scheme."""


def parse_endpoints(endpoints: Sequence[str]) -> list[Address]:
    """Return the addresses of `host:port`, `http://host:port` and `https://host:port` texts."""
    if isinstance(endpoints, str):
        endpoints = endpoints.split(",")
    refuse_userinfo("an etcd endpoint", endpoints, hint=ETCD_LOGIN)
    addresses = [_parse(text.strip()) for text in endpoints if text.strip()]
    if not addresses:
        raise ConfigError("no etcd endpoint was given", hint="name at least one host:port")
    if len({address.target for address in addresses}) != len(addresses):
        raise ConfigError(f"an etcd endpoint is named twice: {', '.join(endpoints)}")
    return addresses


def _parse(text: str) -> Address:
    scheme, separator, _ = text.partition("://")
    if not separator:
        scheme, text = "", f"//{text}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(f"not an etcd endpoint: {text!r}: {error}") from None
    if not host or scheme not in {"", "http", "https"} or parts.path.strip("/"):
        raise ConfigError(f"not an etcd endpoint: {text!r}", hint="host:port or http(s)://host:port")
    bracketed = f"[{host}]" if ":" in host else host
    return Address(f"{bracketed}:{port}", {"http": False, "https": True}.get(scheme))


def _read(path: Path | None) -> bytes | None:
    return None if path is None else read_config(Path(path))
