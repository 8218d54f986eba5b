"""Connecting to etcd: wait for it at the start, check its version, read the status of its members."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from strata.config import Credentials, EtcdConfig
from strata.coordinator.etcd.members import NO_LEADER, EtcdMember
from strata.core.leadership.etcd_version import EtcdVersion, Fitness, judge
from strata.errors import ConfigError, StrataError, Unavailable
from strata.etcd import EtcdStore, MemberStatus, Timing, TlsConfig
from strata.observe import get_logger
from strata.security.tls import read_pem

log = get_logger()

RETRY_S: Final = 1.0
ATTEMPT_S: Final = 2.0
"""Timeout of one attempt, so that the log soon shows that the replica waits, and for which endpoint."""


@asynccontextmanager
async def connected(config: EtcdConfig) -> AsyncIterator[EtcdStore]:
    """Yield a store once any etcd member answers, and close it at the end.

    `Unavailable` if none answers within `config.wait_s`. `ConfigError` if waiting cannot help: wrong
    certificates, a wrong password, a server that is not etcd.
    """
    store = await _connect(config)
    try:
        yield store
    finally:
        await store.close()


async def connect_once(config: EtcdConfig) -> EtcdStore:
    """Return a store if an etcd member answers within `ATTEMPT_S`; else raise as `connected` does."""
    tls = TlsConfig.of(config)
    if tls is not None:
        own = Credentials(ca_file=config.ca_file, cert_file=config.cert_file, key_file=config.key_file)
        read_pem(own, dt.datetime.now(dt.UTC))  # report faulty certificates before connecting to etcd
    return await EtcdStore.connect(
        config.endpoints,
        tls=tls,
        user=config.username or None,
        password=config.password() or None,
        timing=Timing(connect_s=ATTEMPT_S),
    )


async def _connect(config: EtcdConfig) -> EtcdStore:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + config.wait_s
    logged = ""
    while True:
        try:
            return await connect_once(config)
        except Unavailable as error:
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise Unavailable(
                    f"etcd did not answer within {config.wait_s:g} s: {error.message}",
                    hint="check that it runs, and etcd.endpoints (--etcd)",
                ) from error
            if error.message != logged:  # log each error once
                log.warning("waiting_for_etcd", left_s=round(left_s), error=error.message)
            logged = error.message
            await asyncio.sleep(min(RETRY_S, left_s))


async def check_versions(store: EtcdStore) -> None:
    """Warn about every etcd member with known bugs; raise `ConfigError` if one is too old."""
    for endpoint, status in (await store.cluster.statuses()).items():
        if isinstance(status, MemberStatus):
            verdict = judge(EtcdVersion.parse(status.version))
            if verdict.fitness is Fitness.REFUSED:
                raise ConfigError(f"{endpoint}: {verdict.reason}")
            if verdict.fitness is Fitness.SUSPECT:
                log.warning("etcd_has_known_bugs", endpoint=endpoint, reason=verdict.reason)


async def member_statuses(store: EtcdStore) -> list[EtcdMember]:
    """Return the status of every endpoint; for one that does not answer, the error."""
    found = await store.cluster.statuses()
    return [_member(endpoint, status) for endpoint, status in found.items()]


def _member(endpoint: str, status: MemberStatus | StrataError) -> EtcdMember:
    if isinstance(status, StrataError):
        return EtcdMember(endpoint=endpoint, error=status.message)
    return EtcdMember(
        endpoint=endpoint,
        version=status.version,
        healthy=status.leader_id != 0 and not status.errors,
        leader=status.leader_id == status.member_id,
        db_size_bytes=status.db_bytes,
        error="; ".join(status.errors) if status.leader_id else NO_LEADER,
        full=any("NOSPACE" in error for error in status.errors),
    )
