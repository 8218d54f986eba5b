"""`EtcdStore`: the `Store` protocol on a real etcd."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from strata.core.kv.txn import Lease, Range, RangeResult, Txn, TxnResult
from strata.core.leadership.etcd_version import Bug, EtcdVersion, Fitness, Verdict, judge
from strata.errors import ConfigError, Refused
from strata.etcd.begin import authenticator, first_answer
from strata.etcd.cluster import Cluster
from strata.etcd.connection import Connection, Shared
from strata.etcd.kv import KeyValues
from strata.etcd.lease import Leases
from strata.etcd.login import Credentials, Login
from strata.etcd.options import Timing, TlsConfig, parse_endpoints
from strata.etcd.watch import Watch

EARLY_PROGRESS = Bug(
    issue=15220,
    summary="a progress answer can run ahead of the events",
    fixed=(EtcdVersion(3, 4, 25), EtcdVersion(3, 5, 8)),
)


class EtcdStore:
    """A linearizable, revisioned key-value store with leases and watches: etcd itself.

    Made by `connect`, ended by `close` or by leaving it as a context. `verdict` judges the version of the first
    member that answered; None if etcd does not reveal its version to this user.
    """

    def __init__(self, connection: Connection, renewals: Connection, verdict: Verdict | None) -> None:
        self._connection = connection
        self._renewals = renewals
        self._kv = KeyValues(connection)
        self._leases = Leases(connection, renewals)
        # an etcd that does not reveal its version to users is too new to have that bug
        self._trust_progress = verdict is None or not EARLY_PROGRESS.affects(verdict.version)
        self.cluster = Cluster(connection)
        self.verdict = verdict

    @classmethod
    async def connect(
        cls,
        endpoints: Sequence[str],
        *,
        tls: TlsConfig | None = None,
        user: str | None = None,
        password: str | None = None,
        timing: Timing | None = None,
    ) -> Self:
        """Return a store once a member has answered.

        `Unavailable` says of every endpoint why it did not answer. `ConfigError` means that a retry will not
        help: the certificates, user or password are wrong, or an address is not an etcd's.
        """
        timing = Timing() if timing is None else timing
        addresses = parse_endpoints(endpoints)
        if (user is None) != (password is None):
            raise ConfigError("etcd's user authentication needs both a user and a password")
        login = Login(None)
        if user is not None and password is not None:
            login = authenticator(lambda: connection, Credentials(user, password))
        shared = Shared(addresses=addresses, tls=tls, timing=timing, login=login)
        connection = Connection(shared, purpose="calls")
        try:
            anonymous = login.plain
            endpoint = await first_answer(connection)
            await login.renew(anonymous)
            verdict = await _judge(Cluster(connection), endpoint.name)
        except BaseException:
            await connection.close()
            raise
        return cls(connection, Connection(shared, purpose="renewals"), verdict)

    async def close(self) -> None:
        """Drop every connection; calls in flight and watches end with `Unavailable`."""
        self._leases.close()
        await self._renewals.close()
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def read(self, request: Range) -> RangeResult:
        return await self._kv.read(request)

    async def read_at(self, endpoint: str, request: Range) -> RangeResult:
        """Read from one member, before a call that goes to that member alone."""
        return await self._kv.read_at(endpoint, request)

    def execute(self, txn: Txn) -> Coroutine[Any, Any, TxnResult]:
        return self._kv.execute(txn)

    def watch(self, key: str, range_end: str | None, *, start_revision: int) -> Watch:
        return Watch(
            self._connection,
            key,
            range_end,
            start_revision=start_revision,
            trust_progress=self._trust_progress,
        )

    async def grant(self, ttl_s: int) -> Lease:
        return await self._leases.grant(ttl_s)

    async def keep_alive(self, lease_id: int) -> int:
        return await self._leases.keep_alive(lease_id)

    async def revoke(self, lease_id: int) -> None:
        await self._leases.revoke(lease_id)

    async def compact(self, revision: int, *, physical_s: float | None = None) -> None:
        await self._kv.compact(revision, physical_s=physical_s)


async def _judge(cluster: Cluster, endpoint: str) -> Verdict | None:
    """Judge the version at `endpoint`; None if it is not revealed, `ConfigError` if that version must not be used."""
    try:
        version = (await cluster.status(endpoint)).version
    except Refused:
        return None
    try:
        verdict = judge(EtcdVersion.parse(version))
    except ValueError as error:
        raise ConfigError(f"etcd {endpoint}: {error}", hint="is this address etcd's?") from None
    if verdict.fitness is Fitness.REFUSED:
        raise ConfigError(
            f"etcd {endpoint}: {verdict.reason}",
            hint="upgrade every etcd member, one at a time, or name another etcd",
        )
    return verdict
