"""Signals to `strata run` are forwarded and obeyed, and leave no orphaned process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import RANKS, Nodes
from tests.processes import Record


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Start programs with the default signal handlers, even if pytest runs under nohup or in the background."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.journey
def test_a_signal_reaches_the_ranks_and_sets_the_exit_status(
    cluster: LocalCluster, nodes: Nodes, record: Record, number: signal.Signals
) -> None:
    node = nodes.run(cluster.endpoints, "plain", "--wait", options=("--slots", "2"))
    record.wait("start", count=2)
    node.signal(number)
    assert node.join() == 128 + number
    node.wait_quiet()
    assert sorted(e["rank"] for e in record.of("signal")) == [0, 1], "both could clean up"


def test_a_second_signal_does_not_wait_for_stubborn_ranks(
    cluster: LocalCluster, nodes: Nodes, record: Record
) -> None:
    stubborn = """trap 'echo "{\\"event\\": \\"asked\\"}"' TERM; echo '{"event": "up"}'; while :; do sleep 0.1; done"""
    node = nodes.strata(
        *("run", "-e", cluster.endpoints, "--job", nodes.job, "--log-format", "json"),
        *("--stop-grace-s", "1000", "--", "sh", "-c", stubborn),
        name="node",
    )
    record.wait_one("up")
    node.signal(signal.SIGTERM)
    record.wait_one("asked")
    node.signal(signal.SIGTERM)
    assert node.join() == 128 + signal.SIGTERM
    node.wait_quiet()


def test_ranks_that_ignore_the_signal_are_killed_after_the_grace(
    cluster: LocalCluster, nodes: Nodes, record: Record
) -> None:
    node = nodes.run(cluster.endpoints, "family", options=("--stop-grace-s", "1"))
    record.wait_one("start")
    node.signal(signal.SIGTERM)
    assert node.join() == 128 + signal.SIGTERM
    node.wait_quiet()


def test_ctrl_c_in_a_terminal_ends_the_run(cluster: LocalCluster, nodes: Nodes, record: Record) -> None:
    """The terminal sends SIGINT to the foreground process group, which does not include the ranks."""
    node = nodes.run(cluster.endpoints, "plain", "--wait")
    record.wait_one("start")
    os.killpg(node.pid, signal.SIGINT)
    assert node.join() == 128 + signal.SIGINT
    node.wait_quiet()
    assert len(record.of("signal")) == 1


def test_sigkill_of_the_agent_leaves_nothing(cluster: LocalCluster, nodes: Nodes, record: Record) -> None:
    node = nodes.run(cluster.endpoints, "family", options=("--slots", "2"))
    starts = record.wait("start", count=2)
    assert len(node.family()) >= 9, "the agent, two ranks, three children each"
    os.kill(node.pid, signal.SIGKILL)
    assert node.join() == -signal.SIGKILL
    node.wait_quiet()
    assert {e["rank"] for e in starts} == {0, 1}


def test_nohup_is_honoured(cluster: LocalCluster, nodes: Nodes, record: Record) -> None:
    words = f"-m strata run -e {cluster.endpoints} --job {nodes.job}"
    node = nodes.start(
        *("sh", "-c", f"trap '' HUP; exec {sys.executable} {words} -- \"$@\"", "sh"),
        *(sys.executable, str(RANKS / "plain.py"), "--wait"),
        name="node",
    )
    record.wait_one("start")
    node.signal(signal.SIGHUP)
    node.signal(signal.SIGTERM)
    assert node.join() == 128 + signal.SIGTERM
