"""etcd is wiped or set back to an older snapshot while coordinators and a rank run (PROTOCOLS 9.1)."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import strata
from strata import errors
from strata.client.api.coordinator import CoordinatorClient
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import ClusterUid, encode
from strata.core.kv.txn import Delete, Operation, Put, Txn
from strata.core.restore.lineage import successor
from strata.core.restore.records import Restoring
from strata.devcluster.local_cluster import LocalCluster, LocalCoordinator
from strata.etcd import EtcdStore
from strata.v1.worlds_pb2 import GetWorldRequest
from tests.cluster_fixtures import RANKS, Nodes, StartCluster
from tests.processes import LIMIT_S, Record

KEYS = ClusterKeys("default")
NOTICED_S = 5.0
SERVES_S = 10.0
NOISE_S = 4.0
"""Additional seconds on a busy machine."""


class Etcd:
    """The one etcd member of a cluster, and its data folder."""

    def __init__(self, cluster: LocalCluster, older: Path) -> None:
        self._cluster = cluster
        self._member = cluster.etcd.members[0]
        self._older = older

    def keep_a_copy(self) -> None:
        """Stop the member, copy its data, and start it again."""
        self._member.stop()
        shutil.copytree(self._member.data, self._older)
        self._member.start()
        self._cluster.etcd.wait_healthy()

    def swap(self, how: str) -> None:
        """Restart etcd on the older copy, or on no data."""
        self._member.kill()
        shutil.rmtree(self._member.data)
        if how == "older":
            shutil.copytree(self._older, self._member.data)
        self._member.start()
        self._cluster.etcd.wait_healthy()

    def apply(self, *operations: Operation, times: int = 1) -> None:
        """Apply an operator's operations in one transaction, `times` times."""

        async def apply() -> None:
            async with await EtcdStore.connect(self._cluster.etcd.endpoints) as store:
                for _ in range(times):
                    await store.execute(Txn(success=operations))

        asyncio.run(apply())


@pytest.fixture
def cluster(start_cluster: StartCluster) -> LocalCluster:
    return start_cluster(coordinators=2)


@pytest.fixture
def etcd(cluster: LocalCluster, tmp_path: Path) -> Etcd:
    return Etcd(cluster, tmp_path / "older")


@pytest.fixture
def rank(cluster: LocalCluster, job: str) -> Iterator[strata.RankClient]:
    client = strata.connect(cluster.endpoints, job=job, worker_id="w", min_workers=1, timeout_s=LIMIT_S)
    yield client
    with contextlib.suppress(errors.Preempted):  # the cluster that served this rank no longer exists
        client.close()


def ready(coordinator: LocalCoordinator) -> tuple[bool, str]:
    """Return whether the coordinator's probe is ready, and the reason."""
    connection = http.client.HTTPConnection(coordinator.http, timeout=2)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return answer.status == 200, answer.read().decode()
    except OSError as error:
        return False, str(error)
    finally:
        connection.close()


def until(condition: Callable[[], bool], limit_s: float) -> float:
    """Return the seconds until `condition` held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "it never came about"
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wiped", "older"])
def test_no_replica_serves_a_wiped_or_older_etcd_and_messages_name_the_remedy(
    cluster: LocalCluster, etcd: Etcd, rank: strata.RankClient, how: str, job: str
) -> None:
    etcd.keep_a_copy()
    for _ in range(3):
        rank.barrier("b")  # causes writes that the copy does not have
    uid = rank._session.token.uid
    etcd.swap(how)

    took_s = until(lambda: not any(ready(each)[0] for each in cluster.coordinators), LIMIT_S)
    assert took_s < NOTICED_S + NOISE_S
    until(
        lambda: all("etcd was restored or replaced at" in ready(each)[1] for each in cluster.coordinators),
        LIMIT_S,
    )
    for each in cluster.coordinators:
        assert "strata controlplane restore" in ready(each)[1]
    with (
        CoordinatorClient.connect(cluster.endpoints, timeout_s=2.0) as client,
        pytest.raises(errors.Unavailable, match="etcd was restored or replaced at"),
    ):
        client.status()
    with pytest.raises(errors.Unavailable, match="etcd was restored or replaced at"):
        rank.call(GetWorldRequest(job=job), timeout_s=4)
    rank.check()  # no error: the session waits, and the rank has not ended

    restoring = encode(Restoring(who="a test", since_unix_ms=0))
    etcd.apply(Put(key=KEYS.restoring, value=restoring), Delete(key=KEYS.uid))
    until(
        lambda: all("being restored: a test began" in ready(each)[1] for each in cluster.coordinators),
        LIMIT_S,
    )
    now = encode(ClusterUid(uid=successor(uid, 1, "77aa")))
    etcd.apply(Put(key=KEYS.uid, value=now), Delete(key=KEYS.restoring))
    took_s = until(lambda: all(ready(each)[0] for each in cluster.coordinators), LIMIT_S)
    assert took_s < SERVES_S + NOISE_S
    with pytest.raises(errors.ClusterRestored):
        rank.call(GetWorldRequest(job=job), timeout_s=LIMIT_S)
    again = strata.connect(cluster.endpoints, job=job, worker_id="v", min_workers=1, timeout_s=LIMIT_S)
    assert again.barrier("b") == {}
    again.close()


def test_a_replica_that_starts_while_the_control_plane_is_restored_waits(
    cluster: LocalCluster, etcd: Etcd
) -> None:
    restoring = encode(Restoring(who="a test", since_unix_ms=0, source="a backup"))
    for each in cluster.coordinators:
        each.child.kill()
    etcd.apply(Put(key=KEYS.restoring, value=restoring), Delete(key=KEYS.uid))
    for each in cluster.coordinators:
        each.restart()
    why = "the control plane is being restored: a test began, from a backup"
    until(lambda: all(why in ready(each)[1] for each in cluster.coordinators), LIMIT_S)
    etcd.apply(Put(key=KEYS.uid, value=encode(ClusterUid(uid="0b6f.1.77aa"))), Delete(key=KEYS.restoring))
    until(lambda: all(ready(each)[0] for each in cluster.coordinators), LIMIT_S)


@pytest.mark.slow
def test_a_replica_on_an_older_snapshot_refuses_members_with_newer_revisions(
    cluster: LocalCluster, etcd: Etcd, rank: strata.RankClient, job: str
) -> None:
    etcd.keep_a_copy()
    uid = rank._session.token.uid
    etcd.apply(Put(key="/elsewhere", value=b""), times=100)  # more revisions than new replicas write
    rank.barrier("b")
    rank.call(GetWorldRequest(job=job))
    for each in cluster.coordinators:
        each.child.kill()
    etcd.swap("older")
    for each in cluster.coordinators:
        each.restart()

    def says_so() -> bool:
        with pytest.raises(errors.Unavailable) as caught:
            rank.call(GetWorldRequest(job=job), timeout_s=4)
        return "an older snapshot was put under it; the way back: strata controlplane" in caught.value.message

    until(says_so, LIMIT_S)
    rank.check()
    etcd.apply(Put(key=KEYS.uid, value=encode(ClusterUid(uid=successor(uid, 1, "77aa")))))
    with pytest.raises(errors.ClusterRestored):
        rank.call(GetWorldRequest(job=job), timeout_s=LIMIT_S)


def test_a_standalone_training_ends_with_75_once_the_control_plane_was_restored(
    cluster: LocalCluster, etcd: Etcd, nodes: Nodes, record: Record, job: str, tmp_path: Path
) -> None:
    given = {"STRATA_ENDPOINTS": cluster.endpoints, "STRATA_JOB": job}
    words = (sys.executable, str(RANKS / "standalone.py"), "step", str(tmp_path / "storage"))
    program = nodes.start(*words, name="w", env=given)
    record.wait_one("steps")
    with CoordinatorClient.connect(cluster.endpoints, job=job, timeout_s=LIMIT_S) as client:
        uid = client.world().token.uid
    restoring = encode(Restoring(who="a test", since_unix_ms=0))
    etcd.apply(Put(key=KEYS.restoring, value=restoring), Delete(key=KEYS.uid))
    until(lambda: not any(ready(each)[0] for each in cluster.coordinators), LIMIT_S)
    now = encode(ClusterUid(uid=successor(uid, 1, "77aa")))
    etcd.apply(Put(key=KEYS.uid, value=now), Delete(key=KEYS.restoring))
    assert program.join() == 75
    record.wait_line("start the program again, it goes on from the newest checkpoint")
