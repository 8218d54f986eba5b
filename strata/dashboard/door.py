"""Who may look, where that is asked: away from loopback, on a coordinator that knows its callers.

The same identities and the same table as for gRPC: a client certificate, or a token (as Bearer, or as
the password of what a browser asks for). The probes are open: they say nothing of any job.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
from collections.abc import Callable, Sequence
from typing import Final

from strata.config import CoordinatorConfig, is_loopback, split_address
from strata.core.authority import Identity, parse_identity, refusal
from strata.errors import PermissionDenied, Unauthenticated
from strata.security.tokens import AcceptedTokens

OPEN: Final = frozenset({"/healthz", "/readyz"})


class Door:
    """Lets callers in. Made once for a replica; `ConfigError` when the file of tokens cannot be used."""

    def __init__(self, config: CoordinatorConfig, *, now: Callable[[], dt.datetime]) -> None:
        self._cluster = config.cluster
        path = config.accepted_tokens_file
        self._tokens = AcceptedTokens(path, cluster=config.cluster, now=now) if path is not None else None

    def check(self, uris: Sequence[str], authorization: str, job: str | None) -> None:
        """Return if whoever shows this may look, at `job` if one is named; else raise why not.

        `uris` are those of a client certificate that our authority signed. Without `job` it is
        about all of them, which is not for somebody who is limited to some.
        """
        method = "Admin.GetStatus" if job is None else "Worlds.GetJob"
        identity = self._identity(uris, authorization)
        refused = refusal(identity, method, cluster=self._cluster, job=job)
        if refused is not None:
            raise refused
        if job is None and identity.jobs:
            raise PermissionDenied(
                f"{identity} may look at these only: {', '.join(f'/jobs/{one}' for one in sorted(identity.jobs))}"
            )

    def _identity(self, uris: Sequence[str], authorization: str) -> Identity:
        if self._tokens is not None:
            return self._tokens.identify(_token(authorization))
        return parse_identity(list(uris))


def door_of(config: CoordinatorConfig, *, now: Callable[[], dt.datetime]) -> Door | None:
    """Return who lets callers in; None on loopback, and where nobody is asked who they are."""
    host, _port = split_address("coordinator.http_listen", config.http_listen)
    return Door(config, now=now) if config.authenticates and not is_loopback(host) else None


def _token(authorization: str) -> str:
    kind, _, shown = authorization.partition(" ")
    if kind.lower() == "bearer":
        return shown.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(shown, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            pass
    raise Unauthenticated("a token is wanted here", hint="send it as Bearer, or as the password")
