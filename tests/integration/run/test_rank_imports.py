"""Strata imports no grpc in a rank under an agent, and the user may import grpc at any time."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.processes import Record
from tests.ranks.importing import LENGTH, METHODS
from tests.torchrun_agents import agent

pytestmark = [pytest.mark.usefixtures("torch_installed"), pytest.mark.timeout(240)]


def check(record: Record, ranks: int, *, grpc: bool) -> None:
    epochs = record.of("epoch")
    assert sorted((e["rank"], e["method"]) for e in epochs) == sorted(
        (rank, method) for rank in range(ranks) for method in METHODS
    )
    for method in METHODS:
        assert sum(e["seen"] for e in epochs if e["method"] == method) == LENGTH
    assert {e["grpc"] for e in (*epochs, *record.of("end"))} == {grpc}
    assert len(record.of("begun")) == ranks, "no rank crashed and came again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "fork_support"),
    [
        pytest.param("never", None, marks=pytest.mark.journey),
        ("before", "1"),
        pytest.param("before", "0", marks=pytest.mark.campaign),
        ("after", "1"),
    ],
)
def test_ranks_and_their_data_workers_run_under_strata_run_with_and_without_grpc(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path, when: str, fork_support: str | None
) -> None:
    arguments = ("--storage", str(tmp_path), "--grpc", when)
    env = {} if fork_support is None else {"GRPC_FORK": fork_support}
    node = nodes.run(cluster.endpoints, "importing", *arguments, options=("--slots", "2"), env=env)
    assert node.join(200) == 0
    check(record, 2, grpc=when != "never")


@pytest.mark.slow
@pytest.mark.parametrize("when", [pytest.param("never", marks=pytest.mark.campaign), "after"])
def test_ranks_and_their_data_workers_run_under_torchrun_with_and_without_grpc(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path, when: str
) -> None:
    arguments = ("--storage", str(tmp_path), "--grpc", when)
    one = agent(nodes, cluster.endpoints, tmp_path, "importing", *arguments, name="a", nnodes="1")
    assert one.join(200) == 0
    check(record, 1, grpc=when != "never")
