"""Where coordinators are, as people write it, and which one to try next.

`host:50051`, `http://host:50051`, `[::1]:50051`, `host` (port 50051), `unix:/path`, several of
them separated by commas or as a sequence. `https://` asks for TLS, `http://` for plaintext; without
either it is TLS when an authority or a certificate is configured. Plaintext leaves this host only
where `insecure` allows it.
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
    """One address of a coordinator, or the Unix socket (`path`) of a supervisor."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: bool = field(default=False, compare=False)
    """How it is spoken to; the address alone says which endpoint it is."""

    @property
    def is_literal(self) -> bool:
        """Whether `host` is an IP address, so that no name has to be resolved."""
        return _ip(self.host) is not None

    @property
    def target(self) -> str:
        """The address as gRPC names it."""
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
    """Return the endpoints in the order given, each once; `ConfigError` says which one is wrong.

    With `credentials` so is one that would be spoken to in plaintext over a network that nobody
    said is safe, before anything is tried.
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
    """Return if `endpoint` may be spoken to as it would be; else raise `ConfigError`."""
    if endpoint.tls or endpoint.path or credentials.insecure or is_loopback(endpoint.host):
        return
    raise ConfigError(
        f"{endpoint} is not a loopback address, and would be spoken to in plaintext",
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
    if not _HOST.match(host) or not _can_be_looked_up(host):
        raise ConfigError(f"{word!r} does not name a host", hint=_HINT)
    return Endpoint(host=host, port=_port(word, port), tls=tls)


def _can_be_looked_up(host: str) -> bool:
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
"""How long an endpoint is given to connect while others are to be asked, too."""
CONNECT_S: Final = 2.0
"""How long it is given otherwise."""
BASE_S: Final = 0.1
CAP_S: Final = 2.0
ROUND_S: Final = 3.0
"""How long the pauses of a round over all endpoints are at most, together: after an outage of all replicas the
leader gives members five seconds, counted from when it is there, and it may be the only one that is (PROTOCOLS 5.4)."""


class Route:
    """Which endpoint to try next, after how long, and for how long.

    Starts anywhere, so that members spread. After a connection that worked, the next try comes
    within 50 ms and elsewhere; later ones wait longer, jittered, but each endpoint is asked again within
    about four seconds, also when the others say nothing at all. It never gives up.
    """

    def __init__(self, endpoints: Sequence[Endpoint], rng: random.Random, *, cap_s: float = CAP_S) -> None:
        """No pause between two tries is longer than `cap_s`."""
        if not endpoints:
            raise ValueError("a route needs an endpoint")
        self._endpoints = list(endpoints)
        self.rng = rng
        self._cap_s = min(cap_s, ROUND_S / len(self._endpoints))
        self._at = rng.randrange(len(endpoints)) - 1
        self._asked: list[Endpoint] = []
        """Which ones to try first, the last of them next."""
        self._tries = 0
        self._served = False
        self.current: Endpoint | None = None
        self.connect_s = CONNECT_S
        """How long the current endpoint is given to connect."""

    @property
    def count(self) -> int:
        """How many endpoints are configured."""
        return len(self._endpoints)

    def next(self, *, took_s: float = 0.0) -> tuple[Endpoint, float]:
        """Return the endpoint to try, and the seconds to wait before; the try before took `took_s` of these."""
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
        """Return how long this try's endpoint is given to connect.

        After a connection that worked somebody counts the time until this process is back. In the first round whoever does not
        answer at once, a frozen host for one, is not waited for while others were not asked. Later, after as many tries as
        there are endpoints, one is given all the time: another endpoint's each time. The others get as long as the pause would be.
        """
        if not self._served or self._tries % (self.count + 1) == 0:
            return CONNECT_S
        return HASTE_S if self._tries < self.count else max(HASTE_S, self._cap_s)

    def others(self) -> list[Endpoint]:
        """Return the configured endpoints but the current one."""
        return [e for e in self._endpoints if e != self.current]

    def at(self, endpoint: Endpoint) -> None:
        """Take note that this configured endpoint is the current one now."""
        self.current, self._at = endpoint, self._endpoints.index(endpoint)

    def reached(self) -> None:
        """Take note that the current endpoint served: its loss is met at once again."""
        self._tries = 0
        self._served = True
        self._asked.clear()

    def go_to(self, addresses: Iterable[str]) -> None:
        """Try these addresses first, as a replica that steps down asks.

        Those that are configured here come first; the others only if none of these is: a replica
        may know itself by an address that does not reach it from here.
        """
        given = [e for e in self._parsed(addresses) if e != self.current]
        self._asked = [] if self.others() else given
        self.rng.shuffle(self._asked)
        self.prefer(addresses)

    def ask_first(self, endpoint: Endpoint) -> None:
        """Try this configured endpoint next, once, before all others."""
        self._asked.append(endpoint)

    def prefer(self, addresses: Iterable[str]) -> None:
        """Of the configured endpoints try these next, once each, after those that are to be tried first."""
        given = self._parsed(addresses)
        ready = [e for e in self.others() if e in given]
        self.rng.shuffle(ready)
        self._asked = [*ready, *self._asked]

    def _choose(self) -> Endpoint:
        if self._asked:
            return self._asked.pop()
        order = [*self._endpoints[self._at + 1 :], *self._endpoints[: self._at + 1]]
        chosen = next((e for e in order if e != self.current), order[0])
        self._at = self._endpoints.index(chosen)
        return chosen

    def _parsed(self, addresses: Iterable[str]) -> list[Endpoint]:
        """Return what replicas say of each other; they are spoken to as the configured ones are."""
        found = []
        for address in addresses:
            try:
                found.append(_parse(address, tls=any(e.tls for e in self._endpoints)))
            except ConfigError:  # an address we cannot read is one we cannot use
                continue
        return found
