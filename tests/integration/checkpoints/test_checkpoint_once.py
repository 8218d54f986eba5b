"""Under DistributedDataParallel, tensors equal on all ranks are stored once; every rank restores its own state."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.checkpoints_pb2 import CHECKPOINT_STATE_COMMITTED
from tests.cluster_fixtures import Nodes
from tests.processes import Record

pytestmark = pytest.mark.timeout(300)

STEPS = 30


def train(cluster: LocalCluster, nodes: Nodes, storage: Path, *arguments: str, ranks: int) -> None:
    options = ("--slots", str(ranks), "--settle-s", "0.2")
    arguments = ("--storage", str(storage), "--name", nodes.job, *arguments)
    nodes.run(cluster.endpoints, "once", *arguments, node=nodes.job, options=options)


def stored_bytes(cluster: LocalCluster, job: str) -> dict[int, int]:
    """Return the size in bytes of each committed checkpoint of a job."""
    with CoordinatorClient.connect(cluster.endpoints, job=job) as client:
        return {
            each.step: each.size_bytes
            for each in client.checkpoints()
            if each.state == CHECKPOINT_STATE_COMMITTED
        }


def assert_stored_once(cluster: LocalCluster, record: Record, job: str, *, ranks: int) -> None:
    (state_bytes,) = {event["bytes"] for event in record.wait("end", name=job, count=ranks)}
    stored = stored_bytes(cluster, job)
    assert max(stored) == STEPS
    assert max(stored.values()) <= 1.02 * state_bytes, (state_bytes, stored)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["after", "before"])
def test_three_ranks_store_model_and_optimizer_once(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path, wrap: str
) -> None:
    train(cluster, nodes, tmp_path, "--wrap", wrap, ranks=3)
    assert [node.join() for node in nodes.talkers] == [0]
    assert_stored_once(cluster, record, nodes.job, ranks=3)


@pytest.mark.slow
def test_a_full_trainer_is_stored_once_and_resumes_bit_for_bit(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    disturbed, undisturbed = nodes.job, f"{nodes.job}-undisturbed"
    train(cluster, nodes, tmp_path, "--more", "--pace-s", "0.1", ranks=2)
    victim = record.wait("begun", name=disturbed, count=2)[0]
    record.wait("step", name=disturbed, step=13, count=2)
    os.kill(victim["pid"], signal.SIGKILL)
    again = record.wait("begun", name=disturbed, generation=2, count=2)
    assert {event["step"] for event in again} <= {5, 10, 15}
    assert nodes.talkers[-1].join() == 0
    nodes.job = undisturbed
    train(cluster, nodes, tmp_path, "--more", ranks=2)
    assert nodes.talkers[-1].join() == 0
    for job in (disturbed, undisturbed):
        assert_stored_once(cluster, record, job, ranks=2)
    ends = record.of("end")
    assert {event["step"] for event in ends} == {STEPS}
    for rank in (0, 1):
        assert len({event["digest"] for event in ends if event["rank"] == rank}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "incremental"])
@pytest.mark.parametrize("ddp", [(), ("--ddp",)], ids=["no-ddp", "own-buffers"])
def test_ranks_that_are_equal_at_one_save_and_not_at_the_next_restore_exactly(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path, ddp: tuple[str, ...], kind: str
) -> None:
    ranks = 3
    arguments = ("--storage", str(tmp_path), "--kind", kind, *ddp)
    nodes.run(cluster.endpoints, "differing", *arguments, options=("--slots", str(ranks)))
    assert nodes.talkers[-1].join() == 0
    ends = record.of("end")
    assert [event["restored"] for event in ends] == [[True] * 3] * ranks
    sizes, weights, moments = ends[0]["sizes"], ends[0]["weights"], ends[0]["moments"]
    assert sizes[0] <= 1.05 * (weights + moments)
    if ddp:
        # DistributedDataParallel keeps weights and moments equal on all ranks, but not these buffers
        assert sizes[1] <= 1.05 * (weights + moments) + (ranks - 1) * ends[0]["buffers"]
    elif kind == "full":
        assert sizes[1] >= ranks * (weights + moments)
