"""Authentication and authorization of HTTP callers, with the same identities and the same table as for gRPC.

A caller presents a client certificate, or a token (as Bearer, or as the password that a browser prompts for). If the
coordinator authenticates callers, it requires a credential for every change. It also requires a credential for
reading, except on loopback, where every user of the host may read. The probes and the dashboard's static files need
no credential, because they show nothing about jobs.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from strata.config import CoordinatorConfig, is_loopback, split_address
from strata.core.access.authority import Identity, parse_identity, refusal
from strata.errors import PermissionDenied, Unauthenticated
from strata.security.tokens import AcceptedTokens

READ_JOB: Final = "Worlds.GetJob"
READ_STATUS: Final = "Admin.GetStatus"
OPERATE: Final = "Checkpoints.PinCheckpoint"


class HttpAuthorizer:
    """Authorizes the callers of one replica; raises `ConfigError` if the file of tokens cannot be used."""

    def __init__(self, config: CoordinatorConfig, *, now: Callable[[], dt.datetime]) -> None:
        host, _port = split_address("coordinator.http_listen", config.http_listen)
        self._cluster = config.cluster
        self._authenticates = config.authenticates
        self.asks = config.authenticates and not is_loopback(host)
        """Whether reading also requires a certificate or a token."""
        self.review_s = config.review_s
        path = config.accepted_tokens_file
        self._tokens = AcceptedTokens(path, cluster=config.cluster, now=now) if path is not None else None

    @property
    def takes_tokens(self) -> bool:
        """Whether callers authenticate with tokens."""
        return self._tokens is not None

    def caller(self, scope: Mapping[str, Any]) -> Identity | None:
        """Return the caller's identity; None if no credential is required or presented.

        `Unauthenticated` if the credential is missing or not valid.
        """
        state: Mapping[str, Any] = scope.get("state") or {}
        uris: Sequence[str] = state.get("uris", ())
        shown = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        if not self._authenticates or not (self.asks or uris or shown):
            return None
        if self._tokens is not None:
            return self._tokens.identify(_token(shown))
        return parse_identity(list(uris))

    def check(self, identity: Identity | None, job: str | None) -> None:
        """Raise the refusal unless the caller may read `job`, or the cluster if `job` is None."""
        refused = refusal(
            identity, READ_JOB if job is not None else READ_STATUS, cluster=self._cluster, job=job
        )
        if refused is not None:
            raise refused

    def check_page(self, identity: Identity | None, job: str | None) -> None:
        """As `check`, for a page. A page without `job` shows all jobs, so the check refuses a caller who may
        read only some jobs.
        """
        self.check(identity, job)
        if identity is not None and identity.jobs and job is None:
            raise PermissionDenied(
                f"{identity} may look at these only: {', '.join(f'/status/{one}' for one in sorted(identity.jobs))}"
            )

    def may_operate(self, identity: Identity | None) -> bool:
        """Return whether the caller may change something over HTTP."""
        if identity is None:
            return not self._authenticates
        return refusal(identity, OPERATE, cluster=self._cluster) is None

    def check_operates(self, identity: Identity | None) -> None:
        """Raise the refusal unless the caller may change something over HTTP; the gRPC call then checks the action."""
        if identity is None and self._authenticates:
            raise Unauthenticated(
                "a caller without a certificate or token may only read",
                hint="send an operator's token as Bearer",
            )


def _token(authorization: str) -> str:
    kind, _, shown = authorization.partition(" ")
    if kind.lower() == "bearer":
        return shown.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(shown, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            pass
    raise Unauthenticated("a token is required", hint="send it as Bearer, or as the password")
