"""`strata.init` on a whole cluster: a training that goes on from the exact step in any world."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.launch.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.processes import Record
from tests.ranks.training import GLOBAL_BATCH, LENGTH

pytestmark = pytest.mark.timeout(180)

STEPS = LENGTH // GLOBAL_BATCH


def check_samples(record: Record, *, epochs: int) -> None:
    """Each epoch uses each sample once, in the same steps whichever world ran them."""
    by_step: dict[int, list[int]] = {}
    for event in record.of("step"):
        step, samples = event["step"], event["samples"]
        assert by_step.setdefault(step, samples) == samples, f"step {step} had other samples in another world"
    assert sorted(by_step) == list(range(1, epochs * STEPS + 1))
    for epoch in range(epochs):
        used = [i for step in range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1) for i in by_step[step]]
        assert sorted(used) == list(range(LENGTH))
    assert {e["sum"] for e in record.of("end")} == {epochs * sum(range(LENGTH))}


def test_a_rank_is_killed_and_the_world_grows(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    arguments = ("--storage", str(tmp_path), "--epochs", "3")
    options = ("--min-workers", "1", "--max-workers", "2", "--slots", "2", "--settle-s", "0.5")
    nodes.run(cluster.endpoints, "training", *arguments, node="a", options=options)
    victim = record.wait("begun", generation=1, count=2)[0]
    record.wait("step", step=15, generation=1, count=2)
    os.kill(victim["pid"], signal.SIGKILL)
    again = record.wait("begun", generation=2, count=2)
    assert {e["step"] for e in again} == {10}, "the newest committed step"
    record.wait("step", step=25, generation=2, count=2)
    nodes.run(cluster.endpoints, "training", *arguments, node="b", options=options)
    grown = record.wait("begun", generation=3, count=4)
    assert {e["world"] for e in grown} == {4}
    assert all(e["step"] % 10 == 0 and e["step"] >= 20 for e in grown)
    assert [node.join() for node in nodes.talkers] == [0, 0]
    check_samples(record, epochs=3)
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        assert client.latest_checkpoint().step == 3 * STEPS
