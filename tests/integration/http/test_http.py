"""The HTTP side of real replicas: probes, metrics, and hostile clients."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.client import CoordinatorClient
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.local_cluster import LocalCluster
from strata.processes.children import Child
from tests.cluster_fixtures import Nodes, StartCluster
from tests.processes import LIMIT_S, Record


def fetch(address: str, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    code, body = fetch(address, "/metrics")
    assert code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def test_a_replica_that_serves_is_healthy_and_ready(cluster: LocalCluster) -> None:
    for coordinator in cluster.coordinators:
        assert fetch(coordinator.http, "/healthz") == (200, "ok\n")
        assert fetch(coordinator.http, "/readyz") == (200, "ready\n")


def test_the_status_names_the_http_address_of_every_replica(cluster: LocalCluster) -> None:
    found = {replica.replica: replica.http_address for replica in cluster.status().replicas}
    assert found == {c.name: c.http for c in cluster.coordinators}


def test_the_metrics_show_one_leader(cluster: LocalCluster) -> None:
    leader = cluster.leader()
    for coordinator in cluster.coordinators:
        metrics = scrape(coordinator.http)
        assert metrics["strata_is_leader", frozenset()] == (coordinator is leader)
        assert metrics["strata_leader_epoch", frozenset()] == cluster.status().leader_epoch
        assert metrics["strata_audit_differences_total", frozenset()] == 0


def test_the_openmetrics_format_is_served_on_request(cluster: LocalCluster) -> None:
    code, body = fetch(
        cluster.coordinators[0].http, "/metrics", Accept="application/openmetrics-text; version=1.0.0"
    )
    assert code == 200
    assert body.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("10.1.2.3:80", 200),
        ("evil.example", 421),
        ("localhost.evil.example:8080", 421),
        ("[evil]", 421),
    ],
)
def test_a_foreign_host_header_is_refused(cluster: LocalCluster, host: str, code: int) -> None:
    assert fetch(cluster.coordinators[0].http, "/status", Host=host)[0] == code
    assert fetch(cluster.coordinators[0].http, "/readyz", Host=host)[0] == 200, "a probe has any name"


def test_the_http_server_refuses_post_requests(cluster: LocalCluster) -> None:
    request = urllib.request.Request(f"http://{cluster.coordinators[0].http}/", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=LIMIT_S)
    assert refusal.value.code == 405


def test_a_port_that_is_taken_is_a_clear_error(etcd: EtcdCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = Child.start(
            [
                *(sys.executable, "-m", "strata", "coordinator", f"--etcd={etcd.endpoints[0]}"),
                *("--replica=x", "--listen=127.0.0.1:0", f"--http=127.0.0.1:{port}", "--cluster=taken-http"),
            ],
            log=tmp_path / "log",
        )
        assert child.join(LIMIT_S) == 2
    output = child.tail()
    assert f"cannot serve HTTP at 127.0.0.1:{port}: Address already in use" in output
    assert "--http" in output
    assert "Traceback" not in output


def test_the_http_server_can_be_switched_off(etcd: EtcdCluster, nodes: Nodes, record: Record) -> None:
    replica = nodes.strata(
        *("coordinator", f"--etcd={etcd.endpoints[0]}", "--replica=x", "--listen=127.0.0.1:0"),
        *("--http=", "--cluster=no-http", "--log-format=json"),
    )
    address = record.wait_one("replica_registered")["address"]
    with CoordinatorClient.connect(address) as client:
        late_s = time.monotonic() + LIMIT_S
        while not (there := client.status().replicas):  # the replica's view lags behind etcd
            assert time.monotonic() < late_s
        assert [r.http_address for r in there] == [""]
    assert not record.of("http_serves")
    replica.signal(signal.SIGTERM)
    assert replica.join() == 0


@pytest.mark.timeout(120)
def test_stalled_http_clients_do_not_block_the_replica(start_cluster: StartCluster) -> None:
    """Hundreds of connections that never finish a request."""
    (coordinator,) = start_cluster(coordinators=1).coordinators
    host, port = coordinator.http.rsplit(":", 1)
    with contextlib.ExitStack() as held:
        for _ in range(300):
            connection = held.enter_context(socket.create_connection((host, int(port)), timeout=LIMIT_S))
            with contextlib.suppress(OSError):  # the replica closes connections above the limit at once
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        deadline = time.monotonic() + LIMIT_S
        while len(list(Path(f"/proc/{coordinator.child.pid}/fd").iterdir())) > 64 + 64:
            assert time.monotonic() < deadline, "the connections above the limit stay open"
        with CoordinatorClient.connect(coordinator.address) as client:
            assert client.status().leader
        while True:  # held connections end, and then new clients are served
            with contextlib.suppress(OSError):
                if fetch(coordinator.http, "/healthz") == (200, "ok\n"):
                    break
            assert time.monotonic() < deadline
    assert scrape(coordinator.http)["strata_event_loop_lag_max_seconds", frozenset()] < 1


def test_a_signal_ends_a_replica_cleanly_despite_an_open_http_request(start_cluster: StartCluster) -> None:
    local = start_cluster(coordinators=1)
    (coordinator,) = local.coordinators
    host, port = coordinator.http.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as idle:
        idle.sendall(b"GET /readyz HTTP/1.1\r\n")
        coordinator.child.request_stop()
        assert coordinator.child.join(LIMIT_S) == 0
    output = coordinator.log.read_text()
    assert output.count('"signalled"') == 1
    assert '"coordinator_ended"' in output
    assert "Traceback" not in output
