"""`LocalCluster`, the cluster of `strata dev`, of the demo and of these tests."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata.devcluster import ports
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import ConfigError, Unavailable
from tests.cluster_fixtures import ROOT, StartCluster
from tests.processes import LIMIT_S, MARK, marked


@pytest.fixture(scope="module")
def three(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(etcd_members=1, coordinators=3)


def until_led_by_another(cluster: LocalCluster, epoch: int) -> int:
    """Return the next leader's epoch once there is a next leader."""
    deadline = time.monotonic() + LIMIT_S
    while (found := cluster.status().leader_epoch) <= epoch:
        assert time.monotonic() < deadline, "nobody else led"
    return found


def test_every_coordinator_is_ready_and_one_leads(three: LocalCluster) -> None:
    assert len(three.endpoints.split(",")) == 3
    for coordinator in three.coordinators:
        status = coordinator.wait_ready(LIMIT_S)
        assert status.answered_by == coordinator.name
        assert {r.replica for r in status.replicas} == {c.name for c in three.coordinators}
    assert three.leader().name == three.status().leader


def test_a_killed_leader_is_replaced_and_returns_without_taking_the_lead(three: LocalCluster) -> None:
    leader, epoch = three.leader(), three.status().leader_epoch
    leader.child.kill()
    assert leader.child.join(LIMIT_S) == -signal.SIGKILL
    later = until_led_by_another(three, epoch)
    assert three.leader() is not leader
    leader.restart()
    leader.wait_ready(LIMIT_S)
    assert three.status().leader_epoch == later, "who returns takes nothing away"


def test_a_stopped_leader_resigns_before_its_lease_expires(three: LocalCluster) -> None:
    leader, epoch = three.leader(), three.status().leader_epoch
    began = time.monotonic()
    assert leader.child.stop(LIMIT_S) == 0
    until_led_by_another(three, epoch)
    assert time.monotonic() - began < 5.0, "sooner than its lease of 6 s would have ended"
    leader.restart()
    leader.wait_ready(LIMIT_S)


def test_wrong_counts_are_refused(tmp_path: Path, etcd_binary: EtcdBinary) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        LocalCluster.start(tmp_path, coordinators=0, binary=etcd_binary)
    with pytest.raises(ConfigError, match="as many ports"):
        LocalCluster.start(tmp_path, coordinators=2, ports=[1], binary=etcd_binary)
    with pytest.raises(ConfigError, match="1 or 3"):
        LocalCluster.start(tmp_path, etcd_members=2, binary=etcd_binary)
    assert not (tmp_path / "etcd").exists()


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, etcd_binary: EtcdBinary) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} "):
            LocalCluster.start(tmp_path, coordinators=1, ports=[port], binary=etcd_binary)
    assert list(tmp_path.iterdir()) == []


def test_coordinators_and_etcd_never_get_the_same_ports(
    tmp_path: Path, etcd_binary: EtcdBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With independent choices among 17,768 ports, one start in some 500 would clash; this test has 100 ports."""
    first = random.SystemRandom().randrange(15_000, 32_000)
    monkeypatch.setattr(ports, "_candidates", lambda: list(range(first, first + 100)))
    with LocalCluster.start(tmp_path, etcd_members=1, coordinators=1, binary=etcd_binary, fsync=False) as it:
        assert it.status().leader


def test_two_clusters_on_the_same_data_are_refused(tmp_path: Path, etcd_binary: EtcdBinary) -> None:
    for _ in range(2):
        with (
            LocalCluster.start(tmp_path, etcd_members=1, coordinators=1, binary=etcd_binary, fsync=False),
            pytest.raises(ConfigError, match="another cluster runs"),
        ):
            LocalCluster.start(tmp_path, etcd_members=1, coordinators=1, binary=etcd_binary)


def test_a_failed_start_shows_the_output_of_the_coordinator(tmp_path: Path, etcd_binary: EtcdBinary) -> None:
    with pytest.raises(Unavailable, match="coordinator-1 exited with 2") as failed:
        LocalCluster.start(
            tmp_path, etcd_members=1, coordinators=1, binary=etcd_binary, cluster="no/name", fsync=False
        )
    assert "no/name" in failed.value.message


def test_nothing_outlives_the_program_that_started_it(tmp_path: Path, etcd_binary: EtcdBinary) -> None:
    mark = "cluster" + tmp_path.name
    script = f"""
import signal
from pathlib import Path
from strata.devcluster.local_cluster import LocalCluster
LocalCluster.start(Path({str(tmp_path)!r}), etcd_members=1, coordinators=2, fsync=False)
print("up", flush=True)
signal.pause()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, MARK: mark},
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    assert len(marked(mark)) == 4
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + LIMIT_S
    while left := marked(mark):
        assert time.monotonic() < deadline, left
