"""torchrun with Strata's rendezvous: real agents, real coordinators, real gloo."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from strata.launch.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes, StartCluster
from tests.processes import LIMIT_S, Event, Record, Talker
from tests.torchrun_agents import agent

OUTAGE_S = 30.0

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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_agents_rank_0_s_agent_and_all_coordinators_are_lost_and_the_run_finishes(
    start_cluster: StartCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    cluster = start_cluster(etcd_members=1, coordinators=3)
    until = tmp_path / "until"

    def start(name: str) -> Talker:
        return agent(
            nodes, cluster.endpoints, tmp_path, "steps", "--no-barrier", "--until", str(until), name=name
        )

    agents = {name: start(name) for name in "abc"}
    world = starts(record, 1, 3)
    assert {e["worker"] for e in world.values()} == set(agents)

    # a worker killed twice: everybody keeps its rank
    for generation in (2, 3):
        record.wait("step", count=3, step=2, generation=generation - 1)
        os.kill(world[1]["pid"], signal.SIGKILL)
        before, world = world, starts(record, generation, 3)
        assert {r: e["worker"] for r, e in world.items()} == {r: e["worker"] for r, e in before.items()}

    # an agent, and then rank 0's, killed and replaced; nothing of them is left
    for rank in (2, 0):
        newest = max(e["generation"] for e in record.of("start"))
        record.wait("step", count=3, step=2, generation=newest)
        lost = world[rank]["worker"]
        agents[lost].signal(signal.SIGKILL)
        agents[lost].wait_quiet()
        name = f"{lost}-again"
        agents[name] = start(name)
        del agents[lost]
        world = replaced(record, newest, set(agents))

    # all coordinators down: nobody is restarted; a worker that dies meanwhile is told of afterwards
    newest = max(e["generation"] for e in record.of("start"))
    record.wait("step", count=3, step=2, generation=newest)
    for coordinator in cluster.coordinators:
        coordinator.child.kill()
    for coordinator in cluster.coordinators:
        coordinator.child.join()
    down_at = time.monotonic()
    record.until(
        "a step 30 s later",
        lambda events: events[-1]["heard"] > down_at + OUTAGE_S and events[-1]["event"] == "step",
        limit_s=OUTAGE_S + LIMIT_S,
    )
    assert max(e["generation"] for e in record.of("start")) == newest
    os.kill(world[1]["pid"], signal.SIGKILL)
    for coordinator in cluster.coordinators:
        coordinator.restart()
    world = starts(record, newest + 1, 3)
    assert {e["worker"] for e in world.values()} == set(agents)
    record.wait("step", count=3, step=2, generation=newest + 1)
    finish(until, *agents.values())


def replaced(record: Record, before: int, workers: set[str]) -> dict[int, Event]:
    """Return the starts of a generation after `before` that exactly these agents make."""

    def found(events: list[Event]) -> dict[int, Event]:
        newest = max(e["generation"] for e in events if e["event"] == "start")
        there = {e["rank"]: e for e in events if e["event"] == "start" and e["generation"] == newest}
        whole = newest > before and {e["worker"] for e in there.values()} == workers
        return there if whole else {}

    return record.until(f"a world of {workers}", found, limit_s=90)
