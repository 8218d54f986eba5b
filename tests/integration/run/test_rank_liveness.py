"""Ranks that their agent declares dead, under `strata run` with the library: rules 3 and 4 of rank liveness.

`tests/unit/agent/health/test_liveness.py` tests the agent's liveness watch alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests import debugger
from tests.cluster_fixtures import Nodes, StartCluster
from tests.conftest import Need
from tests.cores import need_cores
from tests.processes import Event, Record

DETECT_S = 5.0
LONG_DETECT_S = 15.0
"""Long enough that an agent frozen for 6 s keeps its membership."""
SHORT_DETECT_S = 1.0
NOISE_S = 1.0
"""Additional seconds on a busy machine."""
CORE_MB = 2048
SLOTS = ("--slots", "2")
DEBUGGER = str(Path(debugger.__file__))


@pytest.fixture(scope="module")
def usual(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(coordinators=1, detect_s=DETECT_S)


@pytest.fixture(scope="module")
def patient(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(coordinators=1, detect_s=LONG_DETECT_S)


@pytest.fixture(scope="module")
def quick(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(coordinators=1, detect_s=SHORT_DETECT_S)


def started(nodes: Nodes, cluster: LocalCluster) -> list[Event]:
    """Return the start events of two ranks once both make steps."""
    nodes.run(cluster.endpoints, "steps", options=SLOTS)
    nodes.record.wait("step", step=3, count=2)
    return nodes.record.of("start")


def nobody_died(record: Record, *, starts: int = 2) -> None:
    """Assert that both ranks still make steps in their first generation, and that `starts` ranks began in all."""
    step = max(event["step"] for event in record.of("step"))
    record.wait("step", step=step + 3, count=2)
    assert record.of("rank.killed") == record.of("rank.dumps_core") == []
    assert len(record.of("start")) == starts, "no rank was started again"


def test_a_rank_that_is_stopped_is_killed_and_all_step_again_within_2_s(
    quick: LocalCluster, nodes: Nodes, record: Record
) -> None:
    victim = started(nodes, quick)[0]["pid"]
    stopped_s = time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    killed = record.wait_one("rank.killed")
    assert killed["reason"] == "frozen: a signal has stopped its process for 1 s"
    again = record.wait("step", step=1, count=4)[-1]["heard"] - stopped_s
    assert SHORT_DETECT_S <= again < 2.0 + NOISE_S


@pytest.mark.slow
def test_a_rank_stopped_for_4_s_survives(usual: LocalCluster, nodes: Nodes, record: Record) -> None:
    victim = started(nodes, usual)[0]["pid"]
    os.kill(victim, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(victim, signal.SIGCONT)
    nobody_died(record)


@pytest.mark.slow
def test_ranks_held_by_a_debugger_or_by_the_gil_for_a_minute_survive(
    usual: LocalCluster, nodes: Nodes, record: Record, need: Need
) -> None:
    """The debugger holds one rank of two. In another job each of two ranks holds its GIL."""
    victim = started(nodes, usual)[0]["pid"]
    holds = nodes.start(sys.executable, DEBUGGER, str(victim), name="debugger")
    while debugger.state(victim) != "t" and holds.child.poll() is None:
        time.sleep(0.01)
    need("ptrace", holds.child.poll() is None, debugger.ALLOW)
    nodes.job = f"{nodes.job}-gil"
    node = nodes.run(usual.endpoints, "gil", "--hold-s", "60", node="node-2", options=SLOTS)
    assert min(event["seconds"] for event in record.wait("held", count=2, limit_s=80.0)) >= 60.0
    assert debugger.state(victim) == "t"
    holds.child.stop(0.0)
    assert node.join() == 0
    nobody_died(record, starts=4)


@pytest.mark.slow
@pytest.mark.parametrize("stopped_s", [0.0, 5.0])
def test_an_agent_that_is_frozen_for_6_s_kills_no_rank(
    patient: LocalCluster, nodes: Nodes, record: Record, stopped_s: float
) -> None:
    """A rank is stopped from `stopped_s` before the agent's freeze to `stopped_s` after it.

    With `stopped_s` of 5 s the rank is stopped for 16 s in all, but the agent never observes 15 s of this without a
    gap.
    """
    victim = started(nodes, patient)[0]["pid"]
    if stopped_s:
        os.kill(victim, signal.SIGSTOP)
    time.sleep(stopped_s)
    (node,) = nodes.talkers
    node.signal(signal.SIGSTOP)
    time.sleep(6.0)
    node.signal(signal.SIGCONT)
    time.sleep(stopped_s)
    os.kill(victim, signal.SIGCONT)
    nobody_died(record)


def test_a_rank_that_dumps_core_is_found_while_it_writes_and_its_core_is_whole(
    usual: LocalCluster, nodes: Nodes, record: Record, need: Need, tmp_path: Path
) -> None:
    need_cores(need, tmp_path, megabytes=CORE_MB)
    arguments = ("crashing", "--folder", str(tmp_path), "--mb", str(CORE_MB))
    node = nodes.run(usual.endpoints, *arguments, options=(*SLOTS, "--restart-grace-s", "60"))
    try:
        crashed = record.wait_one("crashes")
        found = record.wait_one("rank.dumps_core")
        assert found["heard"] - crashed["heard"] < NOISE_S
        assert Path(f"/proc/{crashed['pid']}").exists(), "it still writes"
        assert node.join() == 0
        assert len(record.of("end")) == 2, "in the next generation"
        (core,) = (file for file in tmp_path.iterdir() if file.name.startswith("core"))
        assert core.stat().st_size > CORE_MB << 20
    finally:
        for file in tmp_path.iterdir():
            file.unlink()
