"""A training under DistributedDataParallel that is killed twice, in random steps, equals an undisturbed one bit by bit.

To run twenty schedules of kills:

    STRATA_SCHEDULES=20 make test-all ARGS="-k test_ddp_bits"
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import GetJobRequest
from tests.cluster_fixtures import Nodes
from tests.processes import LIMIT_S, Record

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

STARTED_S = 3 * LIMIT_S
"""On a busy machine, several processes that import torch at the same time report nothing for long."""
STEPS = 30
SAVE_EVERY = 5
SCHEDULES = int(os.environ.get("STRATA_SCHEDULES", "5"))
KINDS: tuple[tuple[int, dict[str, bool], str], ...] = (
    (3, {}, "before"),
    (3, {"gradient_as_bucket_view": True}, "after"),
    (3, {"find_unused_parameters": True}, "before"),  # with this option DDP never rebuilds its buckets
    (4, {}, "before"),
    (3, {}, "after"),
)
"""The ranks, the settings of DistributedDataParallel, and whether the model is wrapped before or after strata.init."""


def schedule(number: int) -> list[int]:
    """Return the steps in which generations 1 and 2 are killed: each after a save, and the second after the first."""
    rng = random.Random(f"kills/{number}")
    first = rng.randint(SAVE_EVERY + 1, STEPS - 2 * SAVE_EVERY)
    return [first, rng.randint(first + SAVE_EVERY, STEPS)]


def saved_before(step: int) -> int:
    return (step - 1) // SAVE_EVERY * SAVE_EVERY


def digests(record: Record) -> dict[int, str]:
    """Return the parameters' digest after each step; assert that all ranks and repetitions of a step agree."""
    found: dict[int, str] = {}
    for event in record.of("step"):
        step, digest = event["step"], event["digest"]
        assert found.setdefault(step, digest) == digest, f"step {step} differs"
    return found


def wait_saved(cluster: LocalCluster, job: str, step: int) -> None:
    with CoordinatorClient.connect(cluster.endpoints, job=job, timeout_s=LIMIT_S) as client:
        client.call_until(GetJobRequest(job=job), lambda answer: bool(answer.job.latest_step >= step))


@pytest.mark.parametrize("number", range(SCHEDULES))
def test_a_training_that_is_killed_twice_has_the_same_bits(
    number: int, cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    ranks, ddp, wrapped = KINDS[number % len(KINDS)]
    hang_at = schedule(number)
    arguments = ("--samples", str(4 * ranks * STEPS), "--ddp", json.dumps(ddp), "--wrapped", wrapped)
    options = ("--min-workers", "1", "--max-workers", "1", "--slots", str(ranks))
    node = nodes.run(
        cluster.endpoints,
        *("ddp", "--storage", str(tmp_path / "killed"), "--hang-at", *map(str, hang_at), *arguments),
        options=options,
    )
    for generation, step in enumerate(hang_at, 1):
        begun = record.wait("begun", generation=generation, count=ranks, limit_s=STARTED_S)
        wait_saved(cluster, nodes.job, saved_before(step))
        record.wait("step", generation=generation, step=step - 1, count=ranks)
        os.kill(begun[generation]["pid"], signal.SIGKILL)
    assert node.join(STARTED_S) == 0
    assert [{e["step"] for e in record.of("begun", generation=n)} for n in (1, 2, 3)] == [
        {0},
        *({saved_before(step)} for step in hang_at),
    ]
    killed = digests(record)

    nodes.job = f"{nodes.job}-undisturbed"
    node = nodes.run(
        cluster.endpoints, "ddp", "--storage", str(tmp_path / "undisturbed"), *arguments, options=options
    )
    assert node.join(STARTED_S) == 0
    assert sorted(killed) == list(range(1, STEPS + 1))
    assert digests(record) == killed
