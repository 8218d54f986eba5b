"""torchrun with Strata's rendezvous: real agents, real coordinators, real gloo."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from strata.launch.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.processes import LIMIT_S, Event, Record, Talker
from tests.torchrun_agents import agent

pytestmark = pytest.mark.usefixtures("torch_installed")


def starts(record: Record, generation: int, count: int) -> dict[int, Event]:
    """Return the starts of one generation by rank, once all are there."""
    return {e["rank"]: e for e in record.wait("start", count=count, generation=generation, limit_s=90)}


def finish(until: Path, *agents: Talker) -> None:
    """Let the workers end, and check that all agents end well with nothing left."""
    until.touch()
    assert [one.join(LIMIT_S) for one in agents] == [0] * len(agents)
    for one in agents:
        one.wait_quiet()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_worker_killed_begins_a_generation_and_gloo_meets_in_a_fresh_store(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    pair = [
        agent(nodes, cluster.endpoints, tmp_path, "elastic", str(until), name=name, nnodes="2")
        for name in "ab"
    ]
    first = starts(record, 1, 2)
    record.wait("step", count=2, step=2, generation=1)
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = starts(record, 2, 2)
    record.wait("step", count=2, step=2, generation=2)
    assert {r: e["agent"] for r, e in second.items()} == {r: e["agent"] for r, e in first.items()}
    finish(until, *pair)
