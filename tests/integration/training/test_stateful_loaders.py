"""torchdata's StatefulDataLoader on a whole cluster: every sample must be trained on, although ranks are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import GetJobRequest
from tests.cluster_fixtures import Nodes
from tests.processes import LIMIT_S, Record

pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

LENGTH, BATCH = 240, 6  # as in tests/ranks/stateful.py
TWO = ("--min-workers", "1", "--max-workers", "1", "--slots", "2")


def by_step(record: Record) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each rank's steps; assert that repetitions of a step had the same samples."""
    found: dict[tuple[int, int], list[int]] = {}
    for event in record.of("step"):
        place, samples = (event["step"], event["rank"]), event["samples"]
        assert found.setdefault(place, samples) == samples, f"{place} was repeated with other samples"
    return found


def hung(cluster: LocalCluster, job: str, record: Record, *, generation: int, step: int) -> int:
    """Return the pid of a rank that hangs in this step, once the checkpoint from three steps earlier is committed."""
    begun = record.wait("begun", generation=generation, count=2, limit_s=2 * LIMIT_S)
    record.wait("step", generation=generation, step=step - 1, count=2)
    with CoordinatorClient.connect(cluster.endpoints, job=job, timeout_s=LIMIT_S) as client:
        client.call_until(GetJobRequest(job=job), lambda answer: bool(answer.job.latest_step >= step - 3))
    return int(begun[1]["pid"])


def test_a_shuffled_loader_yields_each_sample_once_an_epoch(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    arguments = ("shuffled", "--storage", str(tmp_path), "--hang-at", "13")
    node = nodes.run(cluster.endpoints, "stateful", *arguments, options=TWO)
    victim = hung(cluster, nodes.job, record, generation=1, step=13)
    os.kill(victim, signal.SIGKILL)
    assert node.join() == 0
    assert {e["step"] for e in record.of("begun", generation=2)} == {10}
    samples, steps = by_step(record), LENGTH // (2 * BATCH)
    assert len(samples) == 2 * 2 * steps
    for epoch in range(2):
        used = [samples[step + epoch * steps, rank] for step in range(1, steps + 1) for rank in (0, 1)]
        assert sorted(i for batch in used for i in batch) == list(range(LENGTH))


def test_a_stream_resumes_in_a_world_of_its_size_and_is_refused_in_another(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    arguments = ("stream", "--storage", str(tmp_path), "--epochs", "3", "--hang-at", "13", "53", "63")
    node = nodes.run(cluster.endpoints, "stateful", *arguments, options=TWO)
    victim = hung(cluster, nodes.job, record, generation=1, step=13)
    os.kill(victim, signal.SIGKILL)
    hung(cluster, nodes.job, record, generation=2, step=53)
    samples = by_step(record)
    for rank in (0, 1):
        for epoch in range(2):
            steps = sorted(step for step, of in samples if of == rank and (step - 1) // 40 == epoch)
            used = [i for step in steps for i in samples[step, rank]]
            assert used == [1000 * n + rank for n in range(len(used))], "each sample once, in order"

    node.signal(signal.SIGKILL)
    assert node.join() == -signal.SIGKILL
    three = ("--min-workers", "1", "--max-workers", "1", "--slots", "3")
    nodes.run(cluster.endpoints, "stateful", *arguments, options=three)
    record.wait_line("2 ranks saved the state of a StatefulDataLoader each, and there are 3 ranks now")
