"""Admission: authentication, authorisation and rate limits of calls and streams.

A call or a stream is authenticated once (`caller`). The table in `strata.core.access.authority` defines what each
identity may do: `admit` checks it for streams, the module `permission` for requests. The same rules apply to unary
calls, sessions, calls on a session, peers and watches. Without authentication every caller is anonymous, and may do
everything.

A stream outlives its admission. So each open stream is reviewed every `review_s`: the function that admitted
the stream checks the stream's credential again. A stream ends if its token was revoked or expired, or if its
certificate expired or is no longer signed by an accepted authority. The client then connects again, as after any
broken connection, with its newer credential if it has one.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from strata.config import CoordinatorConfig
from strata.coordinator.access.permission import check
from strata.coordinator.measures import Measures
from strata.core.access.authority import RULES, Identity, Role, refusal
from strata.core.access.rate_limits import Meter, Seldom
from strata.errors import ConfigError, StrataError, Unauthenticated
from strata.observe import get_logger
from strata.security.certificates import describe
from strata.security.tokens import AcceptedTokens, own_token
from strata.security.trust import Authorities
from strata.wire.tls import Certified, Context, address_of, bearer, certified

log = get_logger()

REVIEW_AT_ONCE: Final = 20
"""How many streams are reviewed between two pauses: each review compares the credential with every token."""
REFUSAL_S: Final = 1.0
"""The shortest time between two log lines about refused streams: a refused client may retry immediately."""


End = Callable[[StrataError], None]
"""Ends a stream with an error."""
Reviewed = Callable[[End], AbstractContextManager[None]]
Credential = str | Certified
"""A token, or a certificate whose owner the transport has authenticated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stream:
    """An admitted stream that is open."""

    credential: Credential = field(repr=False)
    identity: Identity
    kind: str
    end: End


class Admission:
    """The admission of a replica. Making it raises `ConfigError` if the file of tokens or of authorities is invalid."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        now: Callable[[], dt.datetime],
        meter: Meter | None = None,
        measures: Measures | None = None,
    ) -> None:
        self.meter = meter or Meter()
        self.refusals = Seldom(REFUSAL_S)
        self._admitted: set[str] = set()
        self._refused: set[str] = set()
        self._measures = measures or Measures()
        self._cluster = config.cluster
        self._authenticates = config.authenticates
        self._review_s = config.review_s
        self._open: dict[_Stream, None] = {}
        path, ca_file = config.accepted_tokens_file, config.credentials.ca_file
        self._tokens = AcceptedTokens(path, cluster=config.cluster, now=now) if path is not None else None
        self._authorities = Authorities(ca_file, now=now) if path is None and ca_file is not None else None

    def caller(self, context: Context) -> Identity | None:
        """Return the caller's identity, or None without authentication; `Unauthenticated` if the caller proves none."""
        if not self._authenticates:
            return None
        credential = self._credential(context)
        if self._tokens is not None and isinstance(credential, str):
            return self._tokens.identify(credential)
        return self._identity_of(credential)

    def _credential(self, context: Context) -> Credential:
        """Return the caller's credential; `Unauthenticated` if a token is required and the caller sends none."""
        return bearer(context) if self._tokens is not None else certified(context)

    def _identity_of(self, credential: Credential) -> Identity:
        """Return the identity that a credential proves by the tokens last read; `Unauthenticated` if it proves none."""
        if isinstance(credential, str):
            assert self._tokens is not None
            return self._tokens.holder(credential)
        identity = credential.identity()
        if self._authorities is not None and credential.chain:
            self._authorities.check(credential.chain)
        return identity

    def asks(self, context: Context) -> Identity | None:
        """Return the identity as `caller` does, and count the call, even if it is unauthenticated.
        `QuotaExceeded` for too many calls.
        """
        now_s = asyncio.get_running_loop().time()
        try:
            identity = self.caller(context)
        except Unauthenticated:
            if self._tokens is None:  # a certificate belongs to the connection, and cannot change on it
                self._refused.add(context.peer())
            self.meter.stranger(address_of(context), now_s)
            raise
        self.meter.call(identity, now_s)
        self._admitted.add(context.peer())
        return identity

    def admitted(self) -> set[str]:
        """Return the peers (a connection's address and port) with admitted calls since the last call of this method."""
        peers, self._admitted = self._admitted, set()
        return peers

    def refused(self) -> set[str]:
        """Return the peers whose certificate was refused since the last call of this method."""
        peers, self._refused = self._refused, set()
        return peers

    @contextmanager
    def holding(self, identity: Identity | None, kind: str) -> Iterator[None]:
        """Count a stream while the block runs; `QuotaExceeded` if the caller has too many streams."""
        self.meter.open(identity, kind)
        try:
            yield
        finally:
            self.meter.close(identity, kind)

    def reviewed(self, context: Context, identity: Identity | None, kind: str) -> Reviewed:
        """Return a function from a stream's `end` to a context manager; the stream is reviewed while the context
        is open.

        The review calls `end` if the stream would no longer be admitted.
        """
        # read the credential now: after its call has ended, a context cannot be read
        return partial(
            self._under_review, identity, None if identity is None else self._credential(context), kind
        )

    @contextmanager
    def _under_review(
        self, identity: Identity | None, credential: Credential | None, kind: str, end: End
    ) -> Iterator[None]:
        if identity is None or credential is None:
            yield
            return
        stream = _Stream(credential=credential, identity=identity, kind=kind, end=end)
        self._open[stream] = None
        try:
            yield
        finally:
            self._open.pop(stream, None)

    async def review(self) -> None:
        """Review all open streams every `review_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._review_s)
            if not self._readable():
                continue
            for number, stream in enumerate(list(self._open)):
                if number % REVIEW_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if stream in self._open:
                    self._review_stream(stream)

    def _readable(self) -> bool:
        """Reload the tokens; return False if they cannot be read. A file being replaced must not end every session."""
        try:
            if self._tokens is not None:
                self._tokens.reload()
        except ConfigError as error:
            log.warning("open_streams_not_reviewed", error=error.message, hint=error.hint)
            return False
        return True

    def _review_stream(self, stream: _Stream) -> None:
        try:
            if self._identity_of(stream.credential) == stream.identity:
                return
            why = Unauthenticated(f"the rights of the credential of {stream.identity} have changed")
        except Unauthenticated as error:
            why = error
        del self._open[stream]
        self._measures.revoked.child(stream.kind).add()
        log.warning("stream_revoked", kind=stream.kind, identity=str(stream.identity), why=why.message)
        hint = f"{why.hint}; a new connection uses the new one" if why.hint else "connect again"
        stream.end(Unauthenticated(f"admitted earlier, and no longer: {why.message}", hint=hint))

    def admit(self, context: Context, method: str, *, job: str | None = None) -> Identity | None:
        """Return the caller of a stream, or of a call about the cluster, as `asks` does; raise without permission."""
        identity = self.asks(context)
        rule = RULES.get(method)
        # a session names its worker later, in its Hello; `check_session` then checks that worker
        worker = identity.id if identity is not None and rule is not None and rule.own_worker else None
        check(refusal(identity, method, cluster=self._cluster, job=job, worker=worker))
        return identity


def own_identity(config: CoordinatorConfig, *, now: Callable[[], dt.datetime]) -> Identity | None:
    """Return the identity that peers will see for this replica, or None without authentication.

    Raise `ConfigError` if peers would refuse that identity: otherwise this replica would wait for peers without end.
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
        whose = "an unknown identity" if identity is None else identity.uri
        raise ConfigError(
            f"{what} is that of {whose}, not of a coordinator of cluster {config.cluster}", hint=hint
        )
    if config.replica not in ("", identity.id):
        raise ConfigError(
            f"{what} is that of {identity}, and this replica is called {config.replica}:"
            " peers accept a coordinator only under its own name",
            hint=f"{hint} --id {config.replica}, or leave coordinator.replica out",
        )
    return identity
