"""Trainings of a framework: one that is killed at given places, and one that nothing disturbs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import GetJobRequest
from tests.cluster_fixtures import Nodes
from tests.processes import LIMIT_S, Event, Record

PROGRAMS = Path(__file__).parent / "programs"
STARTED_S = 180.0
"""Time without events of ranks that import the frameworks, on a busy machine."""
EPOCH_STEPS = 10
"""The programs train 4 epochs of 220 samples in steps of 24; an epoch's last step has 4."""
Facts = tuple[tuple[str, object], ...]


def train(
    cluster: LocalCluster,
    record: Record,
    program: str,
    folder: Path,
    *,
    job: str,
    hang: tuple[tuple[str, int], ...] = (),
    ranks: int = 2,
    arguments: tuple[str, ...] = (),
) -> None:
    """Train to the end; kill a rank each time that all ranks hang, once the given step is saved."""
    nodes = Nodes(record, job)
    try:
        node = nodes.run_script(
            cluster.endpoints,
            PROGRAMS / program,
            *("--storage", str(folder), "--hang", *(place for place, _step in hang), *arguments),
            options=("--max-workers", "1", "--slots", str(ranks)),
        )
        for generation, (_place, step) in enumerate(hang, 1):
            hanging = record.wait("hangs", generation=generation, count=ranks, limit_s=STARTED_S)
            wait_saved(cluster, job, step)
            os.kill(hanging[-1]["pid"], signal.SIGKILL)
        assert node.join(STARTED_S) == 0
    finally:
        nodes.end()


def wait_saved(cluster: LocalCluster, job: str, step: int) -> None:
    with CoordinatorClient.connect(cluster.endpoints, job=job, timeout_s=LIMIT_S) as client:
        client.call_until(GetJobRequest(job=job), lambda answer: bool(answer.job.latest_step >= step))


def facts_of(record: Record, *kinds: str) -> dict[Facts, Facts]:
    """Return what each rank reported at each place; assert that repetitions of a place agree."""
    found: dict[Facts, Facts] = {}
    for event in record.events:
        if event["event"] in kinds:
            place = {"event", "step", "epoch", "batch", "rank"} & event.keys()
            facts = event.keys() - place - {"generation", "source", "heard"}
            key = tuple((name, event[name]) for name in sorted(place))
            value = tuple((name, str(event[name])) for name in sorted(facts))
            before = found.setdefault(key, value)
            assert before == value, (key, before, value)
    return found


def batches_of(record: Record) -> dict[int, list[int]]:
    """Return the samples of each step over all ranks, in the order of the ranks and batches."""
    newest: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
    for event in record.of("batch"):
        key = event["step"], event["rank"], event["batch"]
        if event["generation"] >= newest.get(key, (0, []))[0]:
            newest[key] = event["generation"], event["ids"]
    found: dict[int, list[int]] = {}
    for (step, _rank, _batch), (_generation, ids) in sorted(newest.items()):
        found.setdefault(step, []).extend(ids)
    return found


def first_of(record: Record, kind: str, generation: int) -> Event:
    return record.of(kind, generation=generation)[0]


def check_one_rank_alone(
    cluster: LocalCluster, undisturbed: Record, program: str, folder: Path, *, job: str
) -> None:
    """Check that one rank uses the same samples in each step as the two undisturbed ranks: each once an epoch."""
    expected = batches_of(undisturbed)
    assert sorted(expected) == list(range(4 * EPOCH_STEPS))
    for epoch in range(4):
        used = [ids for step in range(EPOCH_STEPS) for ids in expected[epoch * EPOCH_STEPS + step]]
        assert sorted(used) == list(range(220))
    record = Record()
    train(cluster, record, program, folder, job=job, ranks=1)
    assert {step: sorted(ids) for step, ids in batches_of(record).items()} == {
        step: sorted(ids) for step, ids in expected.items()
    }
