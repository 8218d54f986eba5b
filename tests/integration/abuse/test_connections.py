"""Connection, handshake and stream floods by an attacker without credentials do not affect other clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from strata.devcluster.etcd_binary import EtcdBinary
from tests.integration.abuse.harness import Victim, assert_bounded, attacked, legitimate, victim

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SECONDS = 12.0
MANY = 1_500


@pytest.fixture(scope="module")
def secured(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with victim(tmp_path_factory.mktemp("secured"), etcd_binary, tls=True) as made:
        yield made


@pytest.fixture(scope="module")
def plain(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with victim(tmp_path_factory.mktemp("plain"), etcd_binary, tls=False) as made:
        yield made


def grpc_port(of: Victim) -> int:
    return of.grpc_port


def http_port(of: Victim) -> int:
    return of.http_port


@pytest.mark.parametrize(
    ("attack", "port", "connections", "tls"),
    [
        ("record", grpc_port, MANY, False),
        ("record", http_port, MANY, False),
        ("silent", grpc_port, MANY, False),
        ("idle", grpc_port, 400, True),
    ],
    ids=["handshakes", "handshakes over HTTP", "silence", "idle strangers"],
)
async def test_idle_connections_take_nothing_from_other_clients(
    secured: Victim,
    attack: str,
    port: Callable[[Victim], int],
    connections: int,
    tls: bool,
    record_property: Callable[[str, object], None],
) -> None:
    async with legitimate(secured) as load:
        report = await attacked(
            secured, attack, port=port(secured), connections=connections, seconds=SECONDS, tls=tls
        )
    record_property("shown", f"{attack} x {connections}: {load}; {report}")
    load.assert_served()
    assert_bounded(report)


async def test_prefaces_and_silent_connections_do_not_disturb_other_clients(
    plain: Victim, record_property: Callable[[str, object], None]
) -> None:
    async with legitimate(plain) as load:
        report = await attacked(plain, "preface", port=plain.grpc_port, connections=MANY, seconds=SECONDS)
    record_property("shown", f"preface x {MANY}: {load}; {report}")
    load.assert_served()
    assert_bounded(report)


@pytest.mark.parametrize(("connections", "times"), [(1, 1), (12, 3)])
async def test_reset_streams_do_not_disturb_other_clients(
    plain: Victim, connections: int, times: int, record_property: Callable[[str, object], None]
) -> None:
    async with legitimate(plain) as load:
        reports = [
            await attacked(plain, "reset", port=plain.grpc_port, connections=connections, seconds=SECONDS)
            for _ in range(times)
        ]
    record_property("shown", f"reset x {connections}: {load}; {'; '.join(map(str, reports))}")
    load.assert_served()
    assert_bounded(*reports)
