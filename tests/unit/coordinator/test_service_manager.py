"""The messages of a replica to systemd, and their times."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Iterator

import pytest

from strata.coordinator.service_manager import ServiceManager, reporting_readiness
from strata.testing.virtual_time import in_virtual_time


class Systemd:
    """The receiving end of $NOTIFY_SOCKET, in the abstract namespace."""

    def __init__(self) -> None:
        self.address = f"@strata-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + self.address[1:])

    def last_seen(self) -> list[str]:
        """Return the assignments received since the last call, in order."""
        found: list[str] = []
        while True:
            try:
                found += self._socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd() -> Iterator[Systemd]:
    listener = Systemd()
    yield listener
    listener.close()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": "vsock:2:1"}, None),
        ({"NOTIFY_SOCKET": "/run/n"}, ServiceManager(address="/run/n")),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "0"}, ServiceManager(address="@n")),
        (
            {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "20000000"},
            ServiceManager(address="@n", watchdog_s=20.0),
        ),
        (
            {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "7"},
            ServiceManager(address="@n", watchdog_s=20.0),
        ),
        (
            {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "8"},
            ServiceManager(address="@n"),
        ),
    ],
)
def test_the_service_manager_is_found_in_the_environment(
    env: dict[str, str], expected: ServiceManager | None
) -> None:
    assert ServiceManager.of(env, pid=7) == expected


@in_virtual_time()
async def test_systemd_is_notified_once_of_readiness_and_then_of_each_status_change(systemd: Systemd) -> None:
    state = [(False, "it is not registered with etcd")]
    with reporting_readiness(ServiceManager(address=systemd.address), lambda: state[0]):
        assert systemd.last_seen() == ["STATUS=does not serve: it is not registered with etcd"]
        state[0] = (True, "")
        await asyncio.sleep(1)
        assert systemd.last_seen() == ["READY=1", "STATUS=serves"]
        state[0] = (False, "etcd has not answered for 2.1 s")
        await asyncio.sleep(1)
        assert systemd.last_seen() == ["STATUS=does not serve: etcd has not answered for 2.1 s"]
        state[0] = (True, "")
        await asyncio.sleep(1)
        assert systemd.last_seen() == ["STATUS=serves"]
    assert systemd.last_seen() == ["STOPPING=1", "STATUS=ends"]
    await asyncio.sleep(60)
    assert systemd.last_seen() == []


@in_virtual_time()
async def test_the_watchdog_is_notified_well_within_its_limit_even_while_not_ready(systemd: Systemd) -> None:
    with reporting_readiness(ServiceManager(address=systemd.address, watchdog_s=20.0), lambda: (False, "no")):
        assert systemd.last_seen().count("WATCHDOG=1") == 1
        await asyncio.sleep(60)
        assert 10 <= systemd.last_seen().count("WATCHDOG=1") <= 12


@in_virtual_time()
async def test_a_missing_systemd_socket_is_no_error(systemd: Systemd) -> None:
    systemd.close()
    with reporting_readiness(ServiceManager(address=systemd.address, watchdog_s=1.0), lambda: (True, "")):
        await asyncio.sleep(1)
    with reporting_readiness(None, lambda: (True, "")):
        await asyncio.sleep(1)
