"""Retention, readers, forks and rewinds on real etcd, through the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1 import checkpoints_pb2 as pb
from tests.cluster_fixtures import Nodes
from tests.integration.cli.test_cli_checkpoints import Commands
from tests.processes import Record

COMMITTED, DELETING = pb.CHECKPOINT_STATE_COMMITTED, pb.CHECKPOINT_STATE_DELETING


def trained(cluster: LocalCluster, nodes: Nodes, storage: Path, *more: str) -> Commands:
    """Train a job to its end; return the `Commands` of that job."""
    node = nodes.run(cluster.endpoints, "saving", "--storage", str(storage), *more)
    assert node.join() == 0
    return Commands(cluster.endpoints, nodes.job)


def until(client: CoordinatorClient, states: Mapping[int, int]) -> None:
    """Return once the catalog has exactly these steps in these states."""
    client.call_until(
        pb.ListCheckpointsRequest(job=client.job),
        lambda answer: {c.step: c.state for c in answer.checkpoints} == states,
    )


def test_the_leader_marks_checkpoints_by_the_rules_and_waits_for_readers(
    cluster: LocalCluster, nodes: Nodes, tmp_path: Path
) -> None:
    commands = trained(cluster, nodes, tmp_path, "--steps", "20")
    assert "no rules are set" in commands.run("retention")
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        (first, *_) = sorted(client.checkpoints(), key=lambda c: c.step)
        which: Any = {"job": nodes.job, "step": first.step, "attempt": first.attempt, "reader": "eval"}
        client.call(pb.OpenCheckpointRequest(**which, who="an evaluation", ttl_s=600))
        found = commands.values("retention", "--keep-count", 1)
        assert found["retention"]["keep"]["latest"] == 1
        until(client, {5: COMMITTED, 10: DELETING, 15: DELETING, 20: COMMITTED})
        client.call(pb.CloseCheckpointRequest(**which))
        until(client, {5: DELETING, 10: DELETING, 15: DELETING, 20: COMMITTED})
        commands.run("gc")
        until(client, {20: COMMITTED})
    assert [path.name[:17] for path in (tmp_path / nodes.job).glob("step-*")] == ["step-000000000020"]
    assert "stays: primary: one of the 1 newest" in commands.run("retention", "--keep-count", 1)
    assert "add --keep-count" in commands.run("retention", "--keep-best", 1, code=2)
    assert "everything" in commands.run("retention", "--keep-count", 0)


@pytest.mark.journey
def test_a_fork_keeps_its_source_checkpoint_while_it_needs_it(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    source = trained(cluster, nodes, tmp_path, "--steps", "20")
    fork = Nodes(record, f"{nodes.job}-fork")
    fork.talkers = nodes.talkers
    source.run("fork", 15, "--to", fork.job)
    source.run("retention", "--keep-count", 1)
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        until(client, {5: DELETING, 10: DELETING, 15: COMMITTED, 20: COMMITTED})
        forked = trained(cluster, fork, tmp_path, "--steps", "30")
        begun = record.of("restored")[-1]
        assert (begun["step"], begun["found"]) == (15, True)
        assert record.of("end")[-1]["sum"] == 465.0
        assert [c["step"] for c in forked.values("list")] == [15, 20, 25, 30], "the fork is not given up"
        assert any(c.step == 15 and c.state == COMMITTED for c in client.checkpoints())
        forked.run("retention", "--keep-count", 2)
        until(client, {5: DELETING, 10: DELETING, 15: DELETING, 20: COMMITTED})


def test_a_running_job_rewinds_and_saves_again(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    nodes.run(cluster.endpoints, "saving", "--storage", str(tmp_path), "--steps", "40", "--pace-s", "0.1")
    record.wait("saving", count=1, step=25)
    commands = Commands(cluster.endpoints, nodes.job)
    rewound = commands.values("rewind", 10, "--yes")
    assert (rewound["step"], rewound["generation"]) == (10, 1)
    begun = record.wait_one("restored", generation=2)
    assert (begun["step"], begun["found"]) == (10, True)
    assert nodes.talkers[0].join() == 0
    assert record.of("end")[-1]["sum"] == 820.0
    listed = commands.values("list")
    of_2 = [c["step"] for c in listed if c["generation"] == 2 and c["state"] == "committed"]
    assert of_2 == [15, 20, 25, 30, 35, 40], "what it saves anew is refused no more"
    assert [(c["step"], c["generation"]) for c in listed if c["latest"]] == [(40, 2)]
    assert "no checkpoint" in commands.run("rewind", 12, "--yes", code=4)
