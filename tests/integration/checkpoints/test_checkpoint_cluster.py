"""Ranks under `strata run` save into one root while processes are killed."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest

from strata.checkpoint.format.marker import committed
from strata.checkpoint.restore.reader import load
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.checkpoints_pb2 import CHECKPOINT_STATE_COMMITTED, Checkpoint
from tests.cluster_fixtures import Nodes, StartCluster
from tests.processes import Record

TWO_AND_ONE = (("a", ("--min-workers", "2", "--slots", "2")), ("b", ("--min-workers", "2")))


def start(nodes: Nodes, endpoints: str, storage: Path, *arguments: str) -> None:
    for node, options in TWO_AND_ONE:
        nodes.run(endpoints, "saving", "--storage", str(storage), *arguments, node=node, options=options)


def catalog(cluster: LocalCluster, job: str) -> list[Checkpoint]:
    with CoordinatorClient.connect(cluster.endpoints, job=job) as client:
        return client.checkpoints()


def check_storage(root: Path, job: str, records: list[Checkpoint]) -> None:
    """Assert that catalog and storage agree, and verify every byte of the committed checkpoints."""
    storage = LocalStorage(root, nonce=lambda: uuid.uuid4().hex)
    known = {r.path.rpartition("/")[2]: r for r in records if r.state == CHECKPOINT_STATE_COMMITTED}
    marked = set()
    for name in storage.list(job):
        if name.startswith("step-") and committed(storage, f"{job}/{name}") is not None:
            marked.add(name)
    assert marked == known.keys()
    for name, record in known.items():
        for rank in range(record.ranks):
            load(storage, f"{job}/{name}", manifest_digest=record.manifest_digest, rank=rank)


@pytest.mark.journey
def test_three_ranks_save_together_and_keep_the_newest(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    start(nodes, cluster.endpoints, tmp_path, "--steps", "20", "--keep", "2")
    assert [node.join() for node in nodes.talkers] == [0, 0]
    ends = record.of("end")
    assert [e["sum"] for e in ends] == [210.0] * 3
    assert {e["found"] for e in record.of("restored")} == {False}
    records = catalog(cluster, nodes.job)
    assert [(r.step, r.state, r.ranks) for r in records] == [
        (15, CHECKPOINT_STATE_COMMITTED, 3),
        (20, CHECKPOINT_STATE_COMMITTED, 3),
    ]
    assert [r.latest for r in records] == [False, True]
    check_storage(tmp_path, nodes.job, records)


@pytest.mark.journey
def test_a_killed_rank_costs_nothing_beyond_the_last_checkpoint(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    start(nodes, cluster.endpoints, tmp_path, "--steps", "30", "--pace-s", "0.05")
    victim = record.wait_one("start", rank=1, generation=1)
    # at most one save is being written and one waits, so the save of step 5 is committed
    record.wait("saving", count=3, step=15, generation=1)
    os.kill(victim["pid"], signal.SIGKILL)
    assert [node.join() for node in nodes.talkers] == [0, 0]
    begun = {e["rank"]: e for e in record.of("restored", generation=2)}
    (step,) = {e["step"] for e in begun.values()}
    assert step >= 5, "two saves at most are in flight"
    assert step % 5 == 0
    assert {rank: e["mine"] for rank, e in begun.items()} == {0: 0, 1: 1, 2: 2}
    assert [e["sum"] for e in record.of("end", generation=2)] == [465.0] * 3
    records = catalog(cluster, nodes.job)
    assert records[-1].step == 30
    assert records[-1].latest
    check_storage(tmp_path, nodes.job, records)


def test_saves_continue_while_coordinators_die(
    start_cluster: StartCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    cluster = start_cluster(coordinators=3)
    start(nodes, cluster.endpoints, tmp_path, "--steps", "40", "--pace-s", "0.1")
    for step, victim in ((5, 0), (15, 1)):
        record.wait("saving", count=3, step=step)
        cluster.coordinators[victim].child.kill()
    assert [node.join() for node in nodes.talkers] == [0, 0]
    assert {e["generation"] for e in record.of("start")} == {1}, "no rank was lost"
    for e in record.of("end"):
        assert e["steps"] == list(range(5, 41, 5))
    survivor = cluster.coordinators[2]
    with CoordinatorClient.connect(survivor.address, job=nodes.job) as client:
        check_storage(tmp_path, nodes.job, client.checkpoints())
