"""The name of a replica, and its first log line."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest

from strata.config import CoordinatorConfig, EtcdConfig
from strata.coordinator import main
from strata.coordinator.main import replica_name, run_coordinator
from strata.core.access.authority import Identity, Role
from strata.errors import ConfigError

EAST = Identity(cluster="default", role=Role.COORDINATOR, id="east-1")


@pytest.mark.parametrize(
    ("config", "identity", "name"),
    [
        (CoordinatorConfig(), None, f"{socket.gethostname()}-50051"),
        (CoordinatorConfig(replica="east-1"), None, "east-1"),
        (CoordinatorConfig(listen="127.0.0.1:0"), EAST, "east-1"),
    ],
)
def test_a_replica_is_named_by_its_setting_certificate_or_host_and_port(
    config: CoordinatorConfig, identity: Identity | None, name: str
) -> None:
    assert replica_name(config, identity) == name


@pytest.mark.parametrize(
    "config",
    [
        CoordinatorConfig(listen="127.0.0.1:0"),
        CoordinatorConfig(replica="no/name"),
        CoordinatorConfig(cluster="no name"),
    ],
)
def test_an_invalid_replica_or_cluster_name_is_a_config_error(config: CoordinatorConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        replica_name(config, None)
    assert caught.value.hint


def test_a_signal_right_after_the_first_log_line_ends_the_coordinator_cleanly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In CI, the log line came before the signal handlers were installed, and SIGTERM killed the replica."""
    logged: list[str] = []
    missed: list[int] = []

    class Log:
        def info(self, event: str, **_more: object) -> None:
            logged.append(event)
            if event == "coordinator_starts":
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(main, "log", Log())
    monkeypatch.setattr(main, "configure", lambda **_: None)
    before = {n: signal.signal(n, lambda number, _frame: missed.append(number)) for n in main.SIGNALS}
    nowhere = EtcdConfig(endpoints=("127.0.0.1:1",), wait_s=0.2)
    try:
        asyncio.run(run_coordinator(CoordinatorConfig(replica="east-1", etcd=nowhere)))
    finally:
        after = {n: signal.signal(n, handler) for n, handler in before.items()}
    assert logged == ["coordinator_starts", "signalled", "coordinator_ended"]
    assert not missed
    assert set(after.values()) == {signal.SIG_IGN}, "nothing interrupts the end of the process"
