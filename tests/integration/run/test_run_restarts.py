"""Ranks and whole nodes die: a new generation starts in the same places, and no process is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.processes import Event, Record, Talker

THREE = ("--min-workers", "3")
QUICK = ("--settle-s", "0.2")


def started(record: Record, generation: int, count: int) -> dict[int, Event]:
    """Return the start events of one generation by rank, once all are recorded."""
    return {e["rank"]: e for e in record.wait("start", count=count, generation=generation)}


def finish(until: Path, *nodes: Talker) -> None:
    """Let the ranks end; assert that all nodes exit with 0 and leave no process."""
    until.touch()
    assert [node.join() for node in nodes] == [0] * len(nodes)
    for node in nodes:
        node.wait_quiet()


@pytest.mark.journey
def test_a_killed_rank_starts_a_generation_in_which_every_rank_keeps_its_place(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--until", str(until))
    a = nodes.run(cluster.endpoints, *steps, node="a", options=("--min-workers", "2", "--slots", "2"))
    b = nodes.run(cluster.endpoints, *steps, node="b", options=("--min-workers", "2"))
    first = started(record, 1, 3)
    record.wait("step", count=3, step=2, generation=1)

    victim = next(rank for rank, e in first.items() if e["worker"] == "a")
    os.kill(first[victim]["pid"], signal.SIGKILL)
    second = started(record, 2, 3)
    record.wait("step", count=3, step=1, generation=2)

    assert {r: e["worker"] for r, e in second.items()} == {r: e["worker"] for r, e in first.items()}
    assert not {e["pid"] for e in second.values()} & {e["pid"] for e in first.values()}
    ended = record.of("rank.ended", rank=victim)
    assert [e["code"] for e in ended] == [-signal.SIGKILL]
    finish(until, a, b)


def test_the_next_generation_runs_in_prewarmed_processes(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    node = nodes.run(
        cluster.endpoints,
        *("steps", "--until", str(until)),
        options=("--slots", "2", "--warm-import", "tests.ranks.warm", *QUICK),
        env={"STRATA_RUN_WARM_AFTER_S": "0"},
    )
    first = started(record, 1, 2)
    warm = {e["pid"] for e in record.wait("warm", count=2)}
    assert not warm & {e["pid"] for e in first.values()}
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = started(record, 2, 2)
    assert {e["pid"] for e in second.values()} == warm
    assert len(record.of("rank.started", generation=2, warm=True)) == 2
    record.wait("warm", count=4)
    record.wait("step", count=2, step=1, generation=2)
    finish(until, node)


def test_a_rank_that_exits_with_an_error_starts_a_new_generation(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    node = nodes.run(
        cluster.endpoints, "steps", "--until", str(until), options=("--slots", "2", "--min-workers", "1")
    )
    first = started(record, 1, 2)
    os.kill(first[1]["pid"], signal.SIGABRT)
    started(record, 2, 2)
    record.wait("step", count=2, step=1, generation=2)
    finish(until, node)


def test_a_rank_s_forked_and_stubborn_children_end_with_it(
    cluster: LocalCluster, nodes: Nodes, record: Record
) -> None:
    node = nodes.run(cluster.endpoints, "family", options=QUICK)
    for generation in (1, 2):
        start = record.wait_one("start", generation=generation)
        assert len(start["children"]) == 3
        family = set(node.family())
        assert family >= {start["pid"], *start["children"]}
        if generation == 1:
            os.kill(start["pid"], signal.SIGKILL)
    before = record.of("start", generation=1)[0]
    assert not set(node.family()) & {before["pid"], *before["children"]}
    node.signal(signal.SIGTERM)
    assert node.join() == 128 + signal.SIGTERM
    node.wait_quiet()


@pytest.mark.journey
def test_a_killed_agent_takes_its_ranks_along_and_is_replaced_on_return(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--until", str(until))
    a, b, c = (
        nodes.run(cluster.endpoints, *steps, node=name, options=("--min-workers", "2", "--max-workers", "3"))
        for name in "abc"
    )
    first = started(record, 1, 3)
    record.wait("step", count=3, step=1, generation=1)

    os.kill(c.pid, signal.SIGKILL)
    c.wait_quiet()
    second = started(record, 2, 2)
    assert {e["worker"] for e in second.values()} == {"a", "b"}
    record.wait("step", count=2, step=1, generation=2)

    back = nodes.run(cluster.endpoints, *steps, node="c", options=("--min-workers", "2"))
    third = started(record, 3, 3)
    assert {e["worker"] for e in third.values()} == {"a", "b", "c"}
    stayed = {r: e["worker"] for r, e in second.items()}
    assert {r: e["worker"] for r, e in third.items() if r in stayed} == stayed, "survivors keep their rank"
    assert len(first) == 3
    finish(until, a, b, back)


def test_below_its_minimum_a_job_waits_and_nothing_runs(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--until", str(until))
    a, b, c = (nodes.run(cluster.endpoints, *steps, node=name, options=THREE) for name in "abc")
    started(record, 1, 3)
    os.kill(c.pid, signal.SIGKILL)
    waiting = record.wait("world.waiting", count=2)
    assert {e["source"] for e in waiting} == {"a", "b"}
    generation = max(e["generation"] for e in waiting)
    assert record.of("start", generation=generation) == []
    back = nodes.run(cluster.endpoints, *steps, node="c", options=THREE)
    started(record, generation + 1, 3)
    finish(until, a, b, back)


def test_a_node_that_leaves_in_order_shrinks_the_world_at_once(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--until", str(until))
    options = ("--min-workers", "1", "--max-workers", "2", "--settle-s", "5")
    a, b = (nodes.run(cluster.endpoints, *steps, node=name, options=options) for name in "ab")
    started(record, 1, 2)
    record.wait("step", count=2, step=1)
    b.signal(signal.SIGTERM)
    assert b.join() == 128 + signal.SIGTERM
    second = started(record, 2, 1)
    assert second[0]["worker"] == "a"
    finish(until, a)


def test_an_agent_started_again_at_once_takes_its_name_back(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    """A service manager restarts an agent immediately, perhaps before the old agent's death is detected."""
    until = tmp_path / "until"
    steps = ("steps", "--until", str(until))
    two = ("--min-workers", "2")
    a, b = (nodes.run(cluster.endpoints, *steps, node=name, options=two) for name in "ab")
    started(record, 1, 2)
    os.kill(b.pid, signal.SIGKILL)
    again = nodes.run(cluster.endpoints, *steps, node="b", options=two)

    def both(events: list[Event]) -> bool:
        newest = max(e["generation"] for e in events if e["event"] == "start")
        there = {e["worker"] for e in events if e["event"] == "start" and e["generation"] == newest}
        return newest > 1 and there == {"a", "b"}

    record.until("both in a later generation", both)
    assert b.join() == -signal.SIGKILL
    finish(until, a, again)


def test_two_ranks_killed_at_once_cost_one_generation_or_two(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--until", str(until))
    a, b, c = (nodes.run(cluster.endpoints, *steps, node=name, options=THREE) for name in "abc")
    first = started(record, 1, 3)
    for rank in (0, 2):
        os.kill(first[rank]["pid"], signal.SIGKILL)
    newest = record.until(
        "three ranks that step again",
        lambda events: next(
            (
                g
                for g in (2, 3)
                if len({e["rank"] for e in events if e["event"] == "step" and e["generation"] == g}) == 3
            ),
            0,
        ),
    )
    assert {e["worker"] for e in record.of("start", generation=newest)} == {"a", "b", "c"}
    finish(until, a, b, c)
