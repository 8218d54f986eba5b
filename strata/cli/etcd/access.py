"""etcd as its operator reaches it: for the commands that ask etcd's members themselves."""

from __future__ import annotations

from strata.config import EtcdConfig
from strata.etcd import EtcdStore, Timing, TlsConfig


async def open_store(config: EtcdConfig, *, timeout_s: float) -> EtcdStore:
    """Return a store once some member of `config` has answered; the caller closes it.

    `timeout_s` bounds this, and everything read through the store. `Unavailable` if no member answered
    in time; `ConfigError` if trying again will not help.
    """
    return await EtcdStore.connect(
        config.endpoints,
        tls=TlsConfig.of(config),
        user=config.username or None,
        password=config.password() or None,
        timing=Timing(connect_s=timeout_s, read_s=timeout_s),
    )
