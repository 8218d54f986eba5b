"""Coordinator endpoints: how they are written, and which one to try next.

Forms: `host:50051`, `http://host:50051`, `[::1]:50051`, `host` (port 50051), `unix:/path`. Several endpoints are
separated by commas, or given as a sequence. `https://` selects TLS, `http://` plaintext. Without either, TLS is
used when an authority or a certificate is configured. Plaintext leaves this host only with `insecure`.
"""

from __future__ import annotations

import ipaddress
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from strata.config import Credentials, is_loopback
from strata.config.client import COORDINATOR_LOGIN
from strata.config.userinfo import refuse_userinfo
from strata.errors import ConfigError

DEFAULT_PORT: Final = 50051
_HINT: Final = 'write host:port, "[::1]:50051" or unix:/path; several are separated by commas'
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One address of a coordinator, or the Unix socket (`path`) of an agent."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: bool = field(default=False, compare=False)
    """Whether to use TLS. Only the address identifies the endpoint."""

    @property
    def is_literal(self) -> bool:
        """Whether `host` is an IP address, so that no name has to be resolved."""
        return _ip(self.host) is not None

    @property
    def target(self) -> str:
        """The address as gRPC writes it."""
        if self.path:
            return f"unix:{self.path}"
        ip = _ip(self.host)
        if ip is None:
            return f"dns:///{self.host}:{self.port}"
        if ip.version == 4:
            return f"ipv4:{ip}:{self.port}"
        return f"ipv6:[{str(ip).replace('%', '%25')}]:{self.port}"

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoints(
    endpoints: str | Iterable[str], credentials: Credentials | None = None
) -> tuple[Endpoint, ...]:
    """Return the endpoints in the order given, each once; the `ConfigError` names the invalid endpoint.

    With `credentials`, also refuse plaintext over a network that is not declared safe, before any connection is
    tried.
    """
    shown = credentials or Credentials()
    parts = [endpoints] if isinstance(endpoints, str) or not isinstance(endpoints, Iterable) else endpoints
    parts = list(parts)
    for part in parts:
        if not isinstance(part, str):
            raise ConfigError(f"an endpoint is text, not {type(part).__name__}", hint=_HINT)
    words = [word.strip() for part in parts for word in part.split(",")]
    refuse_userinfo("a coordinator's endpoint", words, hint=COORDINATOR_LOGIN)
    found = dict.fromkeys(_parse(word, tls=shown.wants_tls) for word in words if word)
    if not found:
        raise ConfigError("no coordinator endpoint is given", hint=_HINT)
    if credentials is not None:
        for endpoint in found:
            check_plaintext(endpoint, credentials)
    return tuple(found)


def check_plaintext(endpoint: Endpoint, credentials: Credentials) -> None:
    """Raise `ConfigError` if `endpoint` would be reached in plaintext and that is not allowed."""
    if endpoint.tls or endpoint.path or credentials.insecure or is_loopback(endpoint.host):
        return
    raise ConfigError(
        f"{endpoint} is not a loopback address, and the connection would be plaintext",
        hint="set tls.ca_file (--tls-ca-file), or pass --insecure (STRATA_INSECURE=1) in a network that you"
        " trust",
    )


def _parse(word: str, *, tls: bool) -> Endpoint:
    if word.startswith("unix:"):
        path = word.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ConfigError(f"{word!r}: the path of a Unix socket begins with /", hint=_HINT)
        return Endpoint(path=path)
    rest = word
    if (scheme := _SCHEME.match(word)) is not None:
        name = scheme[1].lower()
        if name not in {"http", "https", "grpc"}:
            raise ConfigError(f"{word!r}: unknown scheme {scheme[1]!r}", hint=_HINT)
        tls = tls if name == "grpc" else name == "https"
        rest = word[scheme.end() :].removesuffix("/")
    if rest.startswith("["):
        host, closed, tail = rest[1:].partition("]")
        ip = _ip(host)
        if not closed or ip is None or ip.version != 6:
            raise ConfigError(f"{word!r} is not an IPv6 address in brackets", hint=_HINT)
        return Endpoint(host=str(ip), port=_port(word, tail.removeprefix(":")), tls=tls)
    if rest.count(":") > 1:
        raise ConfigError(f"{word!r}: an IPv6 address stands in brackets", hint=_HINT)
    host, _, port = rest.partition(":")
    if not _HOST.match(host) or not _is_resolvable(host):
        raise ConfigError(f"{word!r} does not name a host", hint=_HINT)
    return Endpoint(host=host, port=_port(word, port), tls=tls)


def _is_resolvable(host: str) -> bool:
    try:
        host.encode("idna")  # as the resolver does: no label is empty or longer than 63 bytes
    except UnicodeError:
        return False
    return True


def _port(word: str, text: str) -> int:
    if not text:
        return DEFAULT_PORT
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 0 < int(text) < 65536:
        raise ConfigError(f"{word!r}: {text!r} is not a port", hint=_HINT)
    return int(text)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


HASTE_S: Final = 0.4
"""Seconds an endpoint has to connect while other endpoints must still be tried."""
CONNECT_S: Final = 2.0
"""Seconds an endpoint has to connect otherwise."""
BASE_S: Final = 0.1
CAP_S: Final = 2.0
ROUND_S: Final = 3.0
"""The longest sum of the pauses in one round over all endpoints. After an outage of all replicas the leader
gives members five seconds, counted from the leader's own start. The leader may be the only replica that is up
(PROTOCOLS 5.4)."""


class Route:
    """Choose the endpoint to try next, the pause before the try, and the time to connect.

    Start at a random endpoint, so that members spread. After a connection that worked, the next try comes
    within 50 ms and at another endpoint. Later tries wait longer, jittered, but each endpoint is tried again
    within about four seconds, even if no other endpoint answers. A route never gives up.
    """

    def __init__(self, endpoints: Sequence[Endpoint], rng: random.Random, *, cap_s: float = CAP_S) -> None:
        """Limit every pause between two tries to `cap_s`."""
        if not endpoints:
            raise ValueError("a route needs an endpoint")
        self._endpoints = list(endpoints)
        self.rng = rng
        self._cap_s = min(cap_s, ROUND_S / len(self._endpoints))
        self._at = rng.randrange(len(endpoints)) - 1
        self._first: list[Endpoint] = []
        """The endpoints to try before all others; the last element is the next one."""
        self._tries = 0
        self._served = False
        self.current: Endpoint | None = None
        self.connect_s = CONNECT_S
        """Seconds the current endpoint has to connect."""

    @property
    def count(self) -> int:
        """How many endpoints are configured."""
        return len(self._endpoints)

    def next(self, *, took_s: float = 0.0) -> tuple[Endpoint, float]:
        """Return the next endpoint and the seconds to wait before the try, less `took_s` that the last try used."""
        if self.current is None or self._tries == 0:
            delay_s = 0.0 if self.current is None else self.rng.uniform(0.0, 0.05)
        else:
            longest_s = min(self._cap_s, BASE_S * 2 ** min(self._tries - 1, 16))
            delay_s = max(0.0, longest_s * self.rng.uniform(0.5, 1.0) - took_s)
        self._tries += 1
        self.current = self._choose()
        self.connect_s = self._grace_s()
        return self.current, delay_s

    def _grace_s(self) -> float:
        """Return the seconds that this try's endpoint has to connect: `CONNECT_S` until a connection has worked.

        After a connection that worked, the leader counts the time until this process is back. So in the first
        round each endpoint gets only `HASTE_S`: an endpoint that does not answer (a frozen host, say) must not
        delay the tries of the others. In later rounds one try in `count + 1` gets `CONNECT_S`, at another
        endpoint each time. The other tries get as long as the maximum pause.
        """
        if not self._served or self._tries % (self.count + 1) == 0:
            return CONNECT_S
        return HASTE_S if self._tries < self.count else max(HASTE_S, self._cap_s)

    def others(self) -> list[Endpoint]:
        """Return the configured endpoints without the current one."""
        return [e for e in self._endpoints if e != self.current]

    def at(self, endpoint: Endpoint) -> None:
        """Record that this configured endpoint is now the current one."""
        self.current, self._at = endpoint, self._endpoints.index(endpoint)

    def reached(self) -> None:
        """Record that the current endpoint served, so that the next try follows immediately after its loss."""
        self._tries = 0
        self._served = True
        self._first.clear()

    def go_to(self, addresses: Iterable[str]) -> None:
        """Try these addresses first, as requested by a replica that steps down.

        Configured endpoints among these addresses come first. Addresses that are not configured are used only
        if no other endpoint is configured: an address that a replica reports may not be reachable from here.
        """
        given = [e for e in self._parsed(addresses) if e != self.current]
        self._first = [] if self.others() else given
        self.rng.shuffle(self._first)
        self.prefer(addresses)

    def try_first(self, endpoint: Endpoint) -> None:
        """Try this configured endpoint next, once, before all others."""
        self._first.append(endpoint)

    def prefer(self, addresses: Iterable[str]) -> None:
        """Try those of these addresses that are configured, once each, after the endpoints already in the queue."""
        given = self._parsed(addresses)
        ready = [e for e in self.others() if e in given]
        self.rng.shuffle(ready)
        self._first = [*ready, *self._first]

    def _choose(self) -> Endpoint:
        if self._first:
            return self._first.pop()
        order = [*self._endpoints[self._at + 1 :], *self._endpoints[: self._at + 1]]
        chosen = next((e for e in order if e != self.current), order[0])
        self._at = self._endpoints.index(chosen)
        return chosen

    def _parsed(self, addresses: Iterable[str]) -> list[Endpoint]:
        """Return the valid endpoints among addresses that replicas report of each other, with TLS if any
        configured endpoint has it.
        """
        found = []
        for address in addresses:
            try:
                found.append(_parse(address, tls=any(e.tls for e in self._endpoints)))
            except ConfigError:  # an unreadable address is skipped
                continue
        return found
