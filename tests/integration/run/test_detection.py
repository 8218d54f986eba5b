"""How soon a death is detected, and events that must not count as a death.

The limits are generous, for busy machines; `benchmarks.detection` has the figures.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import RANKS, Nodes, StartCluster
from tests.processes import Record

DETECT_S = 3.0
NOISE_S = 4.0
"""Additional seconds on a busy machine."""
SLOW_DETECT_S = 30.0
"""So long that an earlier detection cannot come from pings."""
TWO = ("--min-workers", "2")


@pytest.fixture(scope="module")
def quick(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(coordinators=2, detect_s=DETECT_S)


@pytest.fixture(scope="module")
def slow(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(coordinators=2, detect_s=SLOW_DETECT_S)


def noticed(record: Record, since: float, *, by: str, generation: int = 2) -> float:
    """Return the seconds from `since` until a node got a newer generation."""

    def reported(events: list[dict[str, object]]) -> float:
        for event in events:
            if (
                event["event"] in {"world.joining", "world.waiting"}
                and event["source"] == by
                and int(str(event["generation"])) >= generation
            ):
                return float(str(event["heard"]))
        return 0.0

    return record.until(f"a new generation at {by}", reported) - since


def test_a_killed_rank_with_forked_workers_is_noticed_at_once(
    slow: LocalCluster, nodes: Nodes, record: Record, torch_installed: None
) -> None:
    loader = ("loader", "--epochs", "100000")
    for name in ("a", "b"):
        nodes.run(slow.endpoints, *loader, node=name, options=TWO)
    record.wait("epoch", count=4, generation=1)
    victim = record.of("start", source="a")[0]
    killed_at = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    assert noticed(record, killed_at, by="b") < 1.5 + NOISE_S
    record.wait("epoch", count=2, generation=2)


def test_a_killed_agent_is_noticed_after_the_grace(slow: LocalCluster, nodes: Nodes, record: Record) -> None:
    a, _ = (nodes.run(slow.endpoints, "plain", "--wait", node=n, options=TWO) for n in ("a", "b"))
    record.wait("start", count=2)
    killed_at = time.monotonic()
    os.kill(a.pid, signal.SIGKILL)
    assert noticed(record, killed_at, by="b") < 1.0 + NOISE_S


@pytest.mark.journey
def test_a_frozen_rank_is_killed_and_replaced(quick: LocalCluster, nodes: Nodes, record: Record) -> None:
    for name in ("a", "b"):
        nodes.run(quick.endpoints, "steps", node=name, options=TWO)
    record.wait("step", count=2, step=2, generation=1)
    victim = record.of("start", source="a")[0]
    frozen_at = time.monotonic()
    os.kill(victim["pid"], signal.SIGSTOP)
    assert noticed(record, frozen_at, by="b") < DETECT_S + 1.0 + NOISE_S
    killed = record.wait_one("rank.killed", source="a")
    assert "frozen" in killed["reason"]
    assert not Path(f"/proc/{victim['pid']}").exists()
    record.wait("step", count=2, step=1, generation=2)


def test_a_frozen_agent_loses_its_place_and_gets_one_when_it_thaws(
    quick: LocalCluster, nodes: Nodes, record: Record
) -> None:
    a, _ = (nodes.run(quick.endpoints, "steps", node=n, options=TWO) for n in ("a", "b"))
    record.wait("step", count=2, step=2, generation=1)
    frozen_at = time.monotonic()
    a.signal(signal.SIGSTOP)
    assert noticed(record, frozen_at, by="b") < DETECT_S + 1.0 + NOISE_S
    a.signal(signal.SIGCONT)
    later = record.until(
        "both ranks in a later generation",
        lambda events: (
            max((e["generation"] for e in events if e["event"] == "step" and e["source"] == "a"), default=1)
            - 1
        ),
    )
    record.wait("step", count=2, step=1, generation=later + 1)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_rank_that_holds_the_gil_for_15_s_is_not_declared_dead(
    quick: LocalCluster, nodes: Nodes, record: Record
) -> None:
    """Both ranks under an agent and a standalone process."""
    job = nodes.job
    supervised = nodes.run(quick.endpoints, "gil", "--hold-s", "15", options=("--slots", "2"))
    alone = nodes.start(
        sys.executable,
        str(RANKS / "gil.py"),
        *("--hold-s", "15"),
        name="alone",
        env={"STRATA_ENDPOINTS": quick.endpoints, "STRATA_JOB": f"{job}-alone", "STRATA_WORKER_ID": "w"},
    )
    held = record.wait("held", count=3, limit_s=60.0)
    assert min(e["seconds"] for e in held) >= 15.0
    assert supervised.join() == 0
    assert alone.join() == 0, [e for e in record.events if e["source"] == "alone"]
    assert len(record.of("start", source="node-1")) == 2, "no rank was restarted"
    assert record.of("rank.killed") == []
    for source in ("node-1", "alone"):
        met = record.of("met", source=source)
        begun = record.of("start", source=source)
        assert {e["incarnation"] for e in met} == {e["incarnation"] for e in begun}
