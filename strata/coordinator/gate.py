"""The gate: who calls, whether they may, and how often.

Who it is, is found out once for a call or a stream (`caller`); what they may do is read from the
table in `strata.core.authority` (`check`), for unary calls, sessions and what they carry, peers and
watches alike. Without authentication everybody is nobody in particular, and may do everything.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from strata.config import CoordinatorConfig
from strata.core.authority import METHODS, RULES, Identity, refusal
from strata.core.rates import Meter
from strata.security.tokens import AcceptedTokens
from strata.wire.tls import Context, bearer, certified


class Gate:
    """Made once for a replica; `ConfigError` when the file of tokens cannot be used."""

    def __init__(
        self, config: CoordinatorConfig, *, now: Callable[[], dt.datetime], meter: Meter | None = None
    ) -> None:
        self.meter = meter or Meter()
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
        """Return who makes a unary call, as `caller`; `QuotaExceeded` when they make too many."""
        identity = self.caller(context)
        self.meter.call(identity, asyncio.get_running_loop().time())
        return identity

    @contextmanager
    def holding(self, identity: Identity | None, kind: str) -> Iterator[None]:
        """Count a stream for as long as the block runs; `QuotaExceeded` when it is one too many."""
        self.meter.open(identity, kind)
        try:
            yield
        finally:
            self.meter.close(identity, kind)

    def admit(self, context: Context, method: str, *, job: str | None = None) -> Identity | None:
        """Return who opens a stream, or asks about the cluster; raises when they may not."""
        identity = self.caller(context)
        rule = RULES.get(method)
        # for whom a session speaks is known with its Hello, and is checked then
        worker = identity.id if identity is not None and rule is not None and rule.own_worker else None
        _raise(refusal(identity, method, cluster=self._cluster, job=job, worker=worker))
        return identity


def check_call(identity: Identity | None, name: str, request: Any, cluster: str) -> None:
    """Return if `identity` may make this call, by its name in session.proto; else raise the refusal."""
    if identity is None:
        return
    method = METHODS.get(name, name)
    fields = request.DESCRIPTOR.fields_by_name
    body = request.registration if "registration" in fields else request
    job: str | None
    if "arrival" in fields:
        job = request.arrival.job
    else:
        job = body.job if "job" in body.DESCRIPTOR.fields_by_name else None
    who = request.author if "author" in fields else body
    worker = who.worker_id if "worker_id" in who.DESCRIPTOR.fields_by_name else None
    _raise(refusal(identity, method, cluster=cluster, job=job, worker=worker))


def check_session(identity: Identity | None, *, cluster: str, job: str, worker: str) -> None:
    """Return if `identity` may be this worker of this job; else raise the refusal."""
    _raise(refusal(identity, "Sessions.Session", cluster=cluster, job=job, worker=worker))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
