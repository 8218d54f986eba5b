"""The gate: who calls, whether they may, and how often.

Who it is, is found out once for a call or a stream (`caller`); what they may do is read from the
table in `strata.core.authority` (`admit` here, `permission` for requests), for unary calls, sessions
and what they carry, peers and watches alike. Without authentication everybody is nobody in
particular, and may do everything.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from strata.config import CoordinatorConfig
from strata.coordinator.permission import check
from strata.core.authority import RULES, Identity, Role, refusal
from strata.core.rates import Meter, Seldom
from strata.errors import ConfigError, Unauthenticated
from strata.security.certificates import describe
from strata.security.tokens import AcceptedTokens, own_token
from strata.wire.tls import Context, address_of, bearer, certified

REFUSAL_S: Final = 1.0
"""How often a refused stream is logged at most: whoever is refused may come again at once."""


class Gate:
    """Made once for a replica; `ConfigError` when the file of tokens cannot be used."""

    def __init__(
        self, config: CoordinatorConfig, *, now: Callable[[], dt.datetime], meter: Meter | None = None
    ) -> None:
        self.meter = meter or Meter()
        self.refusals = Seldom(REFUSAL_S)
        self._admitted: set[str] = set()
        self._cluster = config.cluster
        self._authenticates = config.authenticates
        path = config.accepted_tokens_file
        self._tokens = AcceptedTokens(path, cluster=config.cluster, now=now) if path is not None else None

    def caller(self, context: Context) -> Identity | None:
        """Return who calls, None where nobody is asked; `Unauthenticated` when they cannot be known."""
        if not self._authenticates:
            return None
        if self._tokens is not None:
            return self._tokens.identify(bearer(context))
        return certified(context)

    def asks(self, context: Context) -> Identity | None:
        """Return who calls, as `caller`; `QuotaExceeded` when they do it too often, known or unknown."""
        now_s = asyncio.get_running_loop().time()
        try:
            identity = self.caller(context)
        except Unauthenticated:
            self.meter.stranger(address_of(context), now_s)
            raise
        self.meter.call(identity, now_s)
        self._admitted.add(context.peer())
        return identity

    def admitted(self) -> set[str]:
        """Return the peers whose calls were admitted since this was last asked: the connection's address and port."""
        peers, self._admitted = self._admitted, set()
        return peers

    @contextmanager
    def holding(self, identity: Identity | None, kind: str) -> Iterator[None]:
        """Count a stream for as long as the block runs; `QuotaExceeded` when it is one too many."""
        self.meter.open(identity, kind)
        try:
            yield
        finally:
            self.meter.close(identity, kind)

    def admit(self, context: Context, method: str, *, job: str | None = None) -> Identity | None:
        """Return who opens a stream, or asks about the cluster, as `asks`; raises when they may not."""
        identity = self.asks(context)
        rule = RULES.get(method)
        # for whom a session speaks is known with its Hello, and is checked then
        worker = identity.id if identity is not None and rule is not None and rule.own_worker else None
        check(refusal(identity, method, cluster=self._cluster, job=job, worker=worker))
        return identity


def own_identity(config: CoordinatorConfig, *, now: Callable[[], dt.datetime]) -> Identity | None:
    """Return what this replica's peers will take it for, None where nobody is asked; else `ConfigError`.

    They would refuse it one by one, and it would wait for them for ever.
    """
    mine = config.credentials
    identity: Identity | None
    if config.accepted_tokens_file is not None:
        what, hint = f"the token in {mine.token_file}", "strata tokens add --role coordinator"
        accepted = AcceptedTokens(config.accepted_tokens_file, cluster=config.cluster, now=now)
        try:
            identity = accepted.identify(own_token(mine))
        except Unauthenticated as error:
            raise ConfigError(f"{what}: {error.message}", hint=hint) from None
    elif mine.cert_file is not None:
        what, hint = f"the certificate {mine.cert_file}", "strata certs issue --role coordinator"
        identity = describe(mine.cert_file).identity
    else:
        return None
    if identity is None or identity.role is not Role.COORDINATOR or identity.cluster != config.cluster:
        whose = "nobody that Strata knows" if identity is None else identity.uri
        raise ConfigError(
            f"{what} is that of {whose}, not of a coordinator of cluster {config.cluster}", hint=hint
        )
    if config.replica not in ("", identity.id):
        raise ConfigError(
            f"{what} is that of {identity}, and this replica is called {config.replica}:"
            " peers believe a coordinator under its own name only",
            hint=f"{hint} --id {config.replica}, or leave coordinator.replica out",
        )
    return identity
