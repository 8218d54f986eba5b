"""TLS and tokens for gRPC: channels, a server's credentials, and a caller's identity."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from strata.config import Credentials
from strata.core.access.authority import Identity, parse_identity
from strata.errors import StrataError, Unauthenticated
from strata.observe import get_logger
from strata.security.tls import Pem, Stamp, read_pem, stamp_of
from strata.security.tokens import own_token

log = get_logger()

_BEARER: Final = "Bearer "

Metadata = tuple[tuple[str, str], ...]


def open_channel(target: str, *, options: Sequence[tuple[str, int]], pem: Pem | None) -> grpc.aio.Channel:
    """Return a channel to `target`: TLS with the files in `pem`, plaintext for None."""
    if pem is None:
        return grpc.aio.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=pem.ca, private_key=pem.key, certificate_chain=pem.cert
    )
    return grpc.aio.secure_channel(target, credentials, options=options)


def shown(credentials: Credentials) -> Metadata:
    """Return the metadata with our token; empty if we have none."""
    token = own_token(credentials)
    return (("authorization", _BEARER + token),) if token else ()


class ServerTls:
    """The credentials of a server's port, read again for new connections when the files changed.

    With `verify_clients`, a caller must present a certificate of our authority. If a new file cannot be used,
    the old credentials stay in use, and the problem is logged once.
    """

    def __init__(
        self, credentials: Credentials, *, verify_clients: bool, now: Callable[[], dt.datetime]
    ) -> None:
        self._credentials = credentials
        self._verify = verify_clients
        self._now = now
        self._stamp: Stamp = ()
        self._complaint = ""

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for `add_secure_port`; `ConfigError` if the files are wrong."""
        self._stamp = stamp_of(self._credentials)
        first = self._configuration()
        fetch: Any = self._fetch  # returns None for "unchanged", which grpc's types do not allow
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=self._verify)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, or None to keep the present one; called before each handshake.

        Runs in one of gRPC's threads, so it must not raise.
        """
        now = stamp_of(self._credentials)
        if now == self._stamp:
            return None
        try:
            found = self._configuration()
        except StrataError as error:
            if self._complaint != error.message:
                self._complaint = error.message
                log.warning("certificate_not_loaded", error=error.message, hint=error.hint)
            return None
        self._stamp, self._complaint = now, ""
        log.info("certificate_loaded", cert_file=str(self._credentials.cert_file))
        return found

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pem = read_pem(self._credentials, self._now())
        assert pem.key is not None  # CoordinatorConfig ensures that a port with TLS has a certificate
        assert pem.cert is not None
        return grpc.ssl_server_certificate_configuration(
            [(pem.key, pem.cert)], root_certificates=pem.ca if self._verify else None
        )


class Context(Protocol):
    """The part of a servicer's context that identifies the caller."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the transport's knowledge of the caller."""
        ...

    def invocation_metadata(self) -> Any:
        """Return the metadata that the caller sent."""
        ...

    def peer(self) -> str:
        """Return the caller's address: `ipv4:10.0.0.7:40312`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A certificate whose key the caller has proven to have: its URIs, and its chain in PEM form."""

    uris: tuple[str, ...]
    chain: bytes

    def identity(self) -> Identity:
        """Return the identity that the certificate names; `Unauthenticated` if it names none."""
        return parse_identity(list(self.uris))


def certified(context: Context) -> Certified:
    """Return the caller's certificate; all fields are empty if it presented none."""
    known = context.auth_context()
    uris = tuple(uri.decode("utf-8", errors="replace") for uri in known.get("peer_uri", ()))
    parts = dict.fromkeys((*known.get("x509_pem_cert", ()), *known.get("x509_pem_cert_chain", ())))
    return Certified(uris=uris, chain=b"\n".join(parts))


def address_of(context: Context) -> str:
    """Return the caller's address without its port, which changes with every connection."""
    return context.peer().rpartition(":")[0]


def bearer(context: Context) -> str:
    """Return the token that the caller sent; `Unauthenticated` if it sent none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            if value[: len(_BEARER)].lower() != _BEARER.lower():
                raise Unauthenticated("the authorization is not of the kind Bearer")
            return value[len(_BEARER) :].strip()
    raise Unauthenticated(
        "the coordinator requires a token, and none was sent", hint="set auth.token_file (--token-file)"
    )
