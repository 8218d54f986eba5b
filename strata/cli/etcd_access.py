"""etcd as its operator reaches it: for the commands that ask etcd's members themselves."""

from __future__ import annotations

from strata.config import EtcdConfig
from strata.etcd import EtcdStore, Timing, TlsConfig


async def open_store(config: EtcdConfig, *, timeout_s: float) -> EtcdStore:
    """Return a store once some member of `config` has answered; the caller closes it.

    `timeout_s` bounds this, and everything read through the store. `Unavailable` if no member answered
    in time; `ConfigError` if trying again will not help.
    """
    tls = None
    if config.ca_file is not None or config.cert_file is not None:
        tls = TlsConfig(
            ca_file=config.ca_file,
            cert_file=config.cert_file,
            key_file=config.key_file,
            server_name=config.server_name or None,
        )
    return await EtcdStore.connect(
        config.endpoints,
        tls=tls,
        user=config.username or None,
        password=config.password() or None,
        timing=Timing(connect_s=timeout_s, read_s=timeout_s),
    )
