"""The store through which commands call etcd's members directly."""

from __future__ import annotations

from strata.config import EtcdConfig
from strata.etcd import EtcdStore, Timing, TlsConfig


async def open_store(config: EtcdConfig, *, timeout_s: float) -> EtcdStore:
    """Return a store once a member of `config` has answered; the caller closes it.

    `timeout_s` bounds the connection and every read through the store. Raise `Unavailable` if no member answers in
    time, and `ConfigError` if a retry cannot help.
    """
    return await EtcdStore.connect(
        config.endpoints,
        tls=TlsConfig.of(config),
        user=config.username or None,
        password=config.password() or None,
        timing=Timing(connect_s=timeout_s, read_s=timeout_s),
    )
