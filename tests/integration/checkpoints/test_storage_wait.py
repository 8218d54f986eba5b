"""A node that starts on a full disk waits, reports it, and joins once there is space."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.core.exit_codes import PREEMPTED
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import CheckpointNotFound
from strata.v1.worlds_pb2 import JOB_PHASE_DONE
from tests.cluster_fixtures import ROOT, Nodes
from tests.polling import until
from tests.processes import Talker
from tests.storage.small_disk import Need, SmallDisk, mounted

QUICK = ("--settle-s", "0.2")


@pytest.fixture
def disk(need: Need, tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path / "disk", need) as small:
        yield small


class Job:
    """A training of one rank that has saved and was preempted; its disk is full since then."""

    def __init__(self, cluster: LocalCluster, nodes: Nodes, disk: SmallDisk) -> None:
        self.disk = disk
        self.nodes = nodes
        self.endpoints = cluster.endpoints
        self.arguments = ("--storage", str(disk.folder / "checkpoints"), "--pace-s", "0.05")
        first = self.start()
        with self.client() as client:
            until(lambda: _has_saved(client), "no checkpoint came about")
        first.signal(signal.SIGTERM)
        assert first.join() == PREEMPTED
        disk.fill()

    def client(self) -> CoordinatorClient:
        return CoordinatorClient.connect(self.endpoints, job=self.nodes.job)

    def start(self) -> Talker:
        return self.nodes.run(self.endpoints, "training", *self.arguments, node="a", options=QUICK)

    def nobody_joins(self) -> None:
        with self.client() as client:
            assert client.members() == []
        assert len(self.nodes.record.of("begun")) == 1


def _has_saved(client: CoordinatorClient) -> bool:
    try:
        return client.latest_checkpoint().step > 0
    except CheckpointNotFound:
        return False


@pytest.fixture
def job(cluster: LocalCluster, nodes: Nodes, disk: SmallDisk) -> Job:
    return Job(cluster, nodes, disk)


@pytest.mark.slow
@pytest.mark.journey
def test_a_node_on_a_full_disk_waits_and_joins_when_there_is_space(job: Job) -> None:
    record = job.nodes.record
    stopped = job.start()
    reason = record.wait_one("storage.waiting")["reason"]
    assert "disk full" in reason
    assert str(job.disk.folder) in reason
    job.nobody_joins()
    stopped.signal(signal.SIGTERM)
    assert stopped.join() == PREEMPTED, "it can be asked to stop meanwhile"

    node = job.start()
    record.wait("storage.waiting", count=2)
    job.nobody_joins()
    job.disk.clear()
    record.wait_one("storage.ready")
    assert node.join() == 0
    with job.client() as client:
        assert client.job_status().phase == JOB_PHASE_DONE
        generations = len(client.generations())
    assert generations == len(record.of("begun")) + 1 == 3, (
        "each began once; the preempted one left a forming world"
    )


def test_a_standalone_trainer_on_a_full_disk_waits_until_there_is_space(job: Job) -> None:
    trainer = job.nodes.start(
        *(sys.executable, str(ROOT / "tests" / "ranks" / "training.py"), *job.arguments),
        *("--endpoints", job.endpoints, "--job", job.nodes.job, "--worker-id", "lone"),
        name="lone",
    )
    job.nodes.record.wait_line("disk full; waiting for that before it joins")
    job.nobody_joins()
    job.disk.clear()
    assert trainer.join() == 0
