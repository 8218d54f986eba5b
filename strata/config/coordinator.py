"""`CoordinatorConfig`, `EtcdConfig` and `LogConfig`: the settings of `strata coordinator`."""

# ruff: noqa: RUF009  # `setting` returns a dataclass field, as `dataclasses.field` does
from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from strata.config.credentials import Credentials
from strata.config.loading import load, read_file, setting
from strata.config.userinfo import refuse_userinfo
from strata.documents.reading import read_config
from strata.errors import ConfigError

_GIB = 1 << 30
MAX_PASSWORD_BYTES = 4096


ETCD_LOGIN: Final = "write host:port; etcd.username and etcd.password_file are settings of their own"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """How coordinators connect to etcd."""

    endpoints: tuple[str, ...] = setting(
        "etcd.endpoints", default=("127.0.0.1:2379",), doc="etcd members, comma-separated"
    )
    ca_file: Path | None = setting("etcd.ca_file", default=None, doc="authorities that sign etcd")
    cert_file: Path | None = setting("etcd.cert_file", default=None, doc="our certificate")
    key_file: Path | None = setting("etcd.key_file", default=None, doc="its private key")
    server_name: str = setting(
        "etcd.server_name", default="", doc="the name in etcd's certificate, if not the host's"
    )
    username: str = setting("etcd.username", default="", doc="etcd user, if etcd requires one")
    password_file: Path | None = setting(
        "etcd.password_file", default=None, doc="file with that user's password, mode 0600"
    )
    wait_s: float = setting("etcd.wait_s", default=30.0, doc="how long to wait for etcd at the start")
    quota_bytes: int = setting(
        "etcd.quota_bytes",
        default=2 * _GIB,
        doc="etcd's --quota-backend-bytes; a warning comes at 70 % of it",
    )

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("no etcd endpoint is given", hint="set etcd.endpoints")
        refuse_userinfo("an etcd endpoint", self.endpoints, hint=ETCD_LOGIN)
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("etcd.cert_file and etcd.key_file need each other")
        if bool(self.username) != (self.password_file is not None):
            raise ConfigError("etcd.username and etcd.password_file need each other")
        if self.wait_s < 0:
            raise ConfigError("etcd.wait_s cannot be negative")
        if self.quota_bytes <= 0:
            raise ConfigError("etcd.quota_bytes must be above 0")

    def plaintext_to(self) -> str:
        """Return an endpoint on another machine that would use plaintext; "" if there is none."""
        if self.ca_file is not None or self.cert_file is not None:
            return ""
        return next((one for one in self.endpoints if not _is_local_or_secured(one)), "")

    def password(self) -> str:
        """Return the password without the file's final newline; "" if none is configured."""
        if self.password_file is None:
            return ""
        body = read_config(
            self.password_file, "etcd.password_file", most_bytes=MAX_PASSWORD_BYTES, private=True
        )
        try:
            return body.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigError(
                f"etcd.password_file {self.password_file} is not text", hint="write the password as UTF-8"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """How a process logs."""

    format: str = setting("log.format", default="auto", doc="json, plain, or auto: plain on a terminal")
    level: str = setting("log.level", default="info", doc="debug, info, warning or error")

    def __post_init__(self) -> None:
        _one_of("log.format", self.format, ("auto", "json", "plain"))
        _one_of("log.level", self.level, ("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """The settings of one replica. If `replica` is empty, its name is the id in its certificate; without a
    certificate, host name and port.
    """

    cluster: str = setting("cluster", default="default", doc="the cluster's name in etcd")
    replica: str = setting(
        "coordinator.replica",
        default="",
        doc="this replica's name, by default its certificate's id, else <host>-<port>",
        env="STRATA_REPLICA",
    )
    listen: str = setting(
        "coordinator.listen",
        default="127.0.0.1:50051",
        doc="where clients and peers are served",
        env="STRATA_LISTEN",
    )
    advertise: str = setting(
        "coordinator.advertise",
        default="",
        doc="the address that others connect to, by default the one listened at",
        env="STRATA_ADVERTISE",
    )
    http_listen: str = setting(
        "coordinator.http_listen",
        default="127.0.0.1:8080",
        doc='where the status page, /metrics, /healthz and /readyz are served; "" for nowhere',
        env="STRATA_HTTP_LISTEN",
    )
    accepted_tokens_file: Path | None = setting(
        "auth.accepted_tokens_file",
        default=None,
        doc="hashes of the tokens that are accepted instead of certificates, mode 0600",
    )
    detect_s: float = setting(
        "detect_s", default=5.0, doc="how fast a frozen or lost member is found, in seconds"
    )
    max_jobs: int = setting(
        "coordinator.max_jobs",
        default=10_000,
        doc="how many jobs the cluster may have; a new one beyond is refused",
        env="STRATA_MAX_JOBS",
    )
    max_connections: int = setting(
        "coordinator.max_connections",
        default=8_192,
        doc="how many connections clients and peers may have at this replica in all",
        env="STRATA_MAX_CONNECTIONS",
    )
    max_connections_per_address: int = setting(
        "coordinator.max_connections_per_address",
        default=1_024,
        doc="how many of them one address may have",
        env="STRATA_MAX_CONNECTIONS_PER_ADDRESS",
    )
    review_s: float = setting(
        "auth.review_s",
        default=20.0,
        doc="how often the credentials of open sessions, links and watches are checked again",
    )
    credentials: Credentials = field(default_factory=Credentials)
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def serves_tls(self) -> bool:
        """Whether the port uses TLS."""
        return self.credentials.cert_file is not None

    @property
    def serves_https(self) -> bool:
        """Whether the status page uses TLS; on loopback it does not."""
        return self.serves_tls and not is_loopback(split_address("", self.http_listen)[0])

    @property
    def authenticates(self) -> bool:
        """Whether callers must authenticate."""
        return self.serves_tls or self.accepted_tokens_file is not None

    def __post_init__(self) -> None:
        for name, least in (("max_jobs", 1), ("max_connections", 16), ("max_connections_per_address", 16)):
            if getattr(self, name) < least:
                raise ConfigError(f"coordinator.{name} must be at least {least}")
        if not 0.1 <= self.review_s <= 60:
            raise ConfigError("auth.review_s must be 0.1 to 60 seconds")
        host, _port = split_address("coordinator.listen", self.listen)
        if self.advertise:
            _advertised, port = split_address("coordinator.advertise", self.advertise)
            if port == 0:
                raise ConfigError("coordinator.advertise needs a port that is not 0")
        elif host in ("0.0.0.0", "::"):  # noqa: S104  # refused here, not bound
            raise ConfigError(
                f"others cannot connect to {host}", hint="set coordinator.advertise to host:port"
            )
        if self.serves_tls and self.credentials.ca_file is None and self.accepted_tokens_file is None:
            raise ConfigError(
                "the coordinator has a certificate, but no way to identify its callers",
                hint="set tls.ca_file, or auth.accepted_tokens_file",
            )
        if self.accepted_tokens_file is not None and self.credentials.token_file is None:
            raise ConfigError(
                "replicas identify each other by tokens, too, and this one has none",
                hint="set auth.token_file (--token-file): strata tokens add --role coordinator --out FILE",
            )
        if self.credentials.ca_file is not None and not self.serves_tls:
            raise ConfigError(
                "tls.ca_file without a certificate of our own: the port would be plaintext",
                hint="set tls.cert_file and tls.key_file",
            )
        if not self.serves_tls and not self.credentials.insecure and not is_loopback(host):
            raise ConfigError(
                f"{self.listen} is not a loopback address, and it would serve plaintext",
                hint="set tls.cert_file, tls.key_file and tls.ca_file, listen on 127.0.0.1, or pass"
                " --insecure in a network that you trust",
            )
        if not self.credentials.insecure and (where := self.etcd.plaintext_to()):
            raise ConfigError(
                f"etcd at {where} is not on this machine, and the connection would be plaintext",
                hint="set etcd.ca_file, etcd.cert_file and etcd.key_file, or pass --insecure in a network"
                " that you trust",
            )
        if self.http_listen:
            host, _port = split_address("coordinator.http_listen", self.http_listen)
            if not self.serves_tls and not self.credentials.insecure and not is_loopback(host):
                raise ConfigError(
                    f"coordinator.http_listen: {self.http_listen} is not a loopback address, and it would"
                    " serve plaintext",
                    hint="set tls.cert_file and tls.key_file, listen on 127.0.0.1, or pass --insecure in a"
                    " network that you trust",
                )

    @classmethod
    def load(
        cls,
        *,
        flags: Mapping[str, Any],
        env: Mapping[str, str],
        path: Path | None = None,
    ) -> CoordinatorConfig:
        """Load the configuration from flags, environment and the file at `path` (or a default file)."""
        body, name = read_file(path)
        return load(cls, flags=flags, env=env, file=body, file_name=name)


def split_address(what: str, address: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[v6]:port`; raise a `ConfigError` that names the setting `what`."""
    refuse_userinfo(what or "an address", (address,), hint="write host:port, and [::1]:port for IPv6")
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdecimal() or (":" in host and not bracketed):
        raise ConfigError(
            f"{what}: {address!r} is not an address",
            hint="write host:port, and [::1]:port for IPv6",
        )
    if len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"{what}: {port[:20]} is not a port", hint="a port is 0 to 65535")
    return (host[1:-1] if bracketed else host), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local_or_secured(endpoint: str) -> bool:
    """Return whether an etcd endpoint is local or uses TLS; True if malformed, since the client refuses it anyway."""
    text = endpoint if "://" in endpoint else f"//{endpoint}"
    try:
        found = urlsplit(text)
        host = found.hostname
    except ValueError:
        return True
    return found.scheme == "https" or host is None or is_loopback(host)


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{what} cannot be {value!r}", hint=f"one of {', '.join(allowed)}")
