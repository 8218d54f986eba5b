"""The local cluster of real etcd members that development and other tests use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from strata.devcluster import etcd_cluster as module
from strata.devcluster.etcd_binary import EtcdBinary
from strata.devcluster.etcd_cluster import EtcdCluster
from strata.devcluster.etcd_http import EtcdHttp
from strata.devcluster.ports import free_ports
from strata.errors import ConfigError, Unavailable
from tests.certificates import etcd_identity
from tests.polling import until

if TYPE_CHECKING:
    from tests.etcd_fixtures import StartEtcd

FAST = ("--heartbeat-interval=50", "--election-timeout=250")


def put(cluster: EtcdCluster, key: str) -> None:
    EtcdHttp(cluster.endpoints[0])._ask("/v3/kv/put", {"key": key})


def count(cluster: EtcdCluster, key: str) -> int:
    return int(EtcdHttp(cluster.endpoints[0])._ask("/v3/kv/range", {"key": key}).get("count", 0))


def test_one_member_keeps_data_and_ports_over_a_restart(etcd_binary: EtcdBinary, tmp_path: Path) -> None:
    with EtcdCluster.start(tmp_path / "e", binary=etcd_binary) as cluster:
        put(cluster, "Zm9v")
        endpoints = cluster.endpoints
    assert not cluster.members[0].running
    with EtcdCluster.start(tmp_path / "e", binary=etcd_binary) as cluster:
        assert cluster.endpoints == endpoints
        assert count(cluster, "Zm9v") == 1
        assert "--unsafe-no-fsync" not in cluster.members[0].child._process.args  # type: ignore[operator]
    with pytest.raises(ConfigError, match="holds a cluster of 1 members, not 3"):
        EtcdCluster.start(tmp_path / "e", members=3, binary=etcd_binary)


def test_three_members_lose_their_leader_to_a_kill_and_to_a_freeze(start_etcd: StartEtcd) -> None:
    cluster = start_etcd(3, extra_args=FAST)
    assert len(set(cluster.endpoints)) == 3
    first = cluster.leader()
    assert first not in cluster.followers()
    assert len(cluster.followers()) == 2

    first.kill()
    second = cluster.leader()
    assert second is not first
    with pytest.raises(Unavailable, match=f"{first.name} was ended by SIGKILL"):
        cluster.wait_healthy(1)
    first.restart()
    cluster.wait_healthy()

    second.pause()
    assert second.paused
    assert not second.healthy()
    third = cluster.leader()
    assert third is not second
    second.resume()
    cluster.wait_healthy()
    assert all(member.running for member in cluster.members)


def test_without_a_majority_no_member_is_healthy(start_etcd: StartEtcd) -> None:
    cluster = start_etcd(3, extra_args=FAST)
    for member in cluster.followers():
        member.pause()
    with pytest.raises(Unavailable, match="is not healthy"):
        cluster.wait_healthy(1)
    for member in cluster.members:
        member.resume()
    cluster.wait_healthy()


def test_a_cluster_start_retries_on_other_ports_if_one_is_taken(
    etcd_binary: EtcdBinary, etcd: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = int(etcd.endpoints[0].rsplit(":", 1)[1])
    offers = [[taken, taken + 1], free_ports(2)]
    monkeypatch.setattr(module, "free_ports", lambda count, host: offers.pop(0))
    with EtcdCluster.start(tmp_path / "e", binary=etcd_binary, fsync=False) as cluster:
        assert not offers
        assert cluster.endpoints != etcd.endpoints


def test_a_cluster_from_a_snapshot_retries_on_other_ports_if_one_is_taken(
    etcd_binary: EtcdBinary, etcd: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`strata controlplane restore --from` reads a snapshot from such a cluster."""
    put(etcd, "Zm9v")
    snapshot = tmp_path / "snapshot"
    words = (etcd_binary.tool("etcdctl"), "--endpoints", etcd.endpoints[0], "snapshot", "save", snapshot)
    subprocess.run(words, check=True, capture_output=True)
    taken = int(etcd.endpoints[0].rsplit(":", 1)[1])
    offers = [[taken, taken + 1], free_ports(2)]
    monkeypatch.setattr(module, "free_ports", lambda count, host: offers.pop(0))
    with EtcdCluster.from_snapshot(tmp_path / "e", snapshot, binary=etcd_binary) as cluster:
        assert not offers
        assert cluster.endpoints != etcd.endpoints
        assert count(cluster, "Zm9v") == 1


def test_a_member_that_cannot_start_shows_its_output(etcd_binary: EtcdBinary, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="flag provided but not defined: -no-such-flag"):
        EtcdCluster.start(tmp_path / "e", binary=etcd_binary, extra_args=("--no-such-flag",))


def test_no_member_outlives_the_program_that_started_it(etcd_binary: EtcdBinary, tmp_path: Path) -> None:
    script = f"""
import json, signal, sys
from pathlib import Path
from strata.devcluster.etcd_cluster import EtcdCluster
cluster = EtcdCluster.start(Path({str(tmp_path / "e")!r}), members=3, fsync=False)
print(json.dumps([[m.pid, m.endpoint] for m in cluster.members]), flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    members = json.loads(parent.stdout.readline())
    assert all(EtcdHttp(url).healthy() for _, url in members)
    parent.kill()
    parent.communicate()
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid, _ in members), limit_s=10.0)
    assert not any(EtcdHttp(url).healthy() for _, url in members)


def test_tls_refuses_a_client_without_a_certificate(start_etcd: StartEtcd, tmp_path: Path) -> None:
    cluster = start_etcd(3, tls=etcd_identity(tmp_path))
    assert cluster.endpoints[0].startswith("https://")
    assert cluster.leader() in cluster.members
    with pytest.raises(Unavailable, match="certificate"):
        EtcdHttp(cluster.endpoints[0]).status()
