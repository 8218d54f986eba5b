"""Training goes on during an outage of all coordinators, of the leader, or of an etcd member."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.session.terms import EXIT_REPORT_S
from strata.v1.worlds_pb2 import JOB_PHASE_DONE
from tests.cluster_fixtures import RANKS, Nodes, StartCluster, restart_all
from tests.processes import LIMIT_S, Event, Record, Talker

OUTAGE_S = 30.0
ORPHAN_S = 6.0
"""After this time a leader has deleted every member that it considers an orphan."""
TWO = ("--min-workers", "2")


@pytest.fixture(scope="module")
def whole(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(etcd_members=3, coordinators=3)


@pytest.fixture
def breakable(whole: LocalCluster) -> LocalCluster:
    """Three coordinators and three etcd members, all running when a test begins."""
    for child in [c.child for c in whole.coordinators]:
        child.resume()
    restart_all(whole)
    return whole


def steps_after(record: Record, moment: float, count: int, *, ranks: int) -> None:
    """Return once each of `ranks` ranks has made `count` steps since `moment`."""

    def enough(events: list[Event]) -> bool:
        made: dict[int, int] = {}
        for event in events:
            if event["event"] == "step" and event["heard"] > moment:
                made[event["rank"]] = made.get(event["rank"], 0) + 1
        return len(made) == ranks and min(made.values()) >= count

    record.until(f"{count} steps of each rank", enough)


def same_generation(record: Record, *, ranks: int) -> None:
    assert len(record.of("start")) == ranks, "no rank was restarted"
    assert [e for e in record.of("rank.ended") if e["code"] != 0] == []
    assert {e["generation"] for e in record.of("world.joining")} == {1}


def finish(until: Path, *nodes: Talker) -> None:
    until.touch()
    assert [node.join() for node in nodes] == [0] * len(nodes)
    for node in nodes:
        node.wait_quiet()


def longest_gap(events: list[Event]) -> float:
    times = [float(e["heard"]) for e in events]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ranks_step_on_through_30_s_without_coordinators(
    breakable: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    meet = tmp_path / "meet"
    steps = ("steps", "--no-barrier", "--meet", str(meet))
    pair = [nodes.run(breakable.endpoints, *steps, node=name, options=TWO) for name in ("a", "b")]
    record.wait("step", count=2, step=2)

    for coordinator in breakable.coordinators:
        coordinator.child.kill()
    for coordinator in breakable.coordinators:
        coordinator.child.join()
    down_at = time.monotonic()
    for name in ("a", "b"):
        record.wait_one("session.disconnected", source=name)
    record.until(
        "a step 30 s later",
        lambda events: events[-1]["heard"] > down_at + OUTAGE_S and events[-1]["event"] == "step",
        limit_s=OUTAGE_S + LIMIT_S,
    )
    meet.touch()
    record.wait("arriving", count=2)
    for coordinator in breakable.coordinators:
        coordinator.restart()
    met = record.wait("met", count=2)

    assert [e["ranks"] for e in met] == [[0, 1], [0, 1]], "the barrier arrived at meanwhile is complete"
    for node in pair:
        assert node.join() == 0
        served = record.of("session.connected", source=node.name)
        assert len(served) >= 2
        assert len({e["incarnation"] for e in served}) == 1, "the member of before, not a new one"
    same_generation(record, ranks=2)
    for rank in (0, 1):
        assert longest_gap(record.of("step", rank=rank)) < 5.0, "stepping never paused"
    with CoordinatorClient.connect(breakable.endpoints, job=nodes.job) as client:
        assert client.world().world.generation == 1


@pytest.mark.slow
def test_members_reconnect_if_only_one_of_all_lost_coordinators_returns(
    breakable: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    """The last list of replicas that members got has the other two replicas.

    They must still reconnect to the returned replica in time.
    """
    until = tmp_path / "until"
    steps = ("steps", "--no-barrier", "--until", str(until))
    pair = [nodes.run(breakable.endpoints, *steps, node=name, options=TWO) for name in ("a", "b")]
    record.wait("step", count=2, step=2)
    before = {e["source"]: e for e in record.of("session.connected")}
    with CoordinatorClient.connect(breakable.endpoints) as client:
        names = {replica.replica for replica in client.status().replicas if replica.ready}
    assert len(names) == 3, "every tick names the two others"
    time.sleep(2.0)
    for coordinator in breakable.coordinators:
        coordinator.child.kill()
    for coordinator in breakable.coordinators:
        coordinator.child.join()
    down_at = time.monotonic()
    steps_after(record, down_at + 6.0, 1, ranks=2)
    (alone,) = [c for c in breakable.coordinators if c.name == before["a"]["replica"]]
    alone.restart()

    def served(events: list[Event]) -> list[Event]:
        back = [e for e in events if e["event"] == "session.connected" and e["heard"] > down_at]
        return back if {e["source"] for e in back} == {"a", "b"} else []

    for event in record.until("both nodes served", served):
        assert event["replica"] == before["a"]["replica"]
        assert event["incarnation"] == before[event["source"]]["incarnation"], "the member of before"
    steps_after(record, time.monotonic() + ORPHAN_S, 1, ranks=2)
    same_generation(record, ranks=2)
    finish(until, *pair)


def test_a_rank_that_dies_during_the_outage_is_reported_after_it(
    breakable: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--no-barrier", "--until", str(until))
    pair = [nodes.run(breakable.endpoints, *steps, node=name, options=TWO) for name in ("a", "b")]
    first = {e["rank"]: e for e in record.wait("start", count=2)}
    for coordinator in breakable.coordinators:
        coordinator.child.kill()
    for coordinator in breakable.coordinators:
        coordinator.child.join()
    os.kill(first[0]["pid"], signal.SIGKILL)
    record.wait_one("rank.ended", rank=0)
    steps_after(record, time.monotonic(), 5, ranks=1)
    for coordinator in breakable.coordinators:
        coordinator.restart()
    second = record.wait("start", count=2, generation=2)
    assert {e["worker"] for e in second} == {"a", "b"}
    finish(until, *pair)


@pytest.mark.slow
def test_a_standalone_process_killed_before_its_exit_is_received_can_be_restarted(
    breakable: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"

    def standalone() -> Talker:
        script = (sys.executable, str(RANKS / "stopping.py"), "--storage", str(tmp_path), "--steps", "10")
        env = {
            "STRATA_ENDPOINTS": breakable.endpoints,
            "STRATA_JOB": nodes.job,
            "STRATA_WORKER_ID": "lone",
            "STRATA_TRAIN_SAVE_EVERY_STEPS": "5",
        }
        return nodes.start(*script, "--until", str(until), name="lone", env=env)

    first = standalone()
    record.wait_one("saved", step=10)
    for coordinator in breakable.coordinators:
        coordinator.child.kill()
    for coordinator in breakable.coordinators:
        coordinator.child.join()
    until.touch()
    record.wait_line("no coordinator receives how this rank ended")
    first.signal(signal.SIGTERM)
    assert first.join(EXIT_REPORT_S / 2) == -signal.SIGTERM, "at once"
    for coordinator in breakable.coordinators:
        coordinator.restart()
    assert standalone().join() == 0
    assert [e["step"] for e in record.of("end")] == [10, 10], "there was nothing left to train"
    with CoordinatorClient.connect(breakable.endpoints, job=nodes.job, timeout_s=LIMIT_S) as client:
        assert client.job_status().phase == JOB_PHASE_DONE


@pytest.mark.timeout(180)
def test_barriers_continue_while_each_coordinator_is_killed_in_turn(
    breakable: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--pace-s", "0.01", "--until", str(until))
    three = [
        nodes.run(breakable.endpoints, *steps, node=name, options=("--min-workers", "3"))
        for name in ("a", "b", "c")
    ]
    record.wait("step", count=3, step=5)
    for coordinator in breakable.coordinators:
        coordinator.child.kill()
        killed_at = time.monotonic()
        coordinator.child.join()
        steps_after(record, killed_at, 20, ranks=3)
        coordinator.restart()
        coordinator.wait_ready(LIMIT_S)
        steps_after(record, time.monotonic(), 5, ranks=3)
    same_generation(record, ranks=3)
    finish(until, *three)


@pytest.mark.timeout(180)
@pytest.mark.journey
def test_a_rolling_restart_of_all_coordinators_fails_nothing(
    breakable: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--pace-s", "0.01", "--until", str(until))
    three = [
        nodes.run(breakable.endpoints, *steps, node=name, options=("--min-workers", "3"))
        for name in ("a", "b", "c")
    ]
    record.wait("step", count=3, step=5)
    for coordinator in breakable.coordinators:
        stopped_at = time.monotonic()
        coordinator.child.request_stop()
        assert coordinator.child.join() == 0, "it parts in good order"
        steps_after(record, stopped_at, 20, ranks=3)
        coordinator.restart()
        coordinator.wait_ready(LIMIT_S)
        steps_after(record, time.monotonic(), 5, ranks=3)
    same_generation(record, ranks=3)
    for rank in range(3):
        assert longest_gap(record.of("step", rank=rank)) < 3.0, "nobody waited for a lease or a timeout"
    finish(until, *three)


@pytest.mark.timeout(180)
@pytest.mark.journey
def test_barriers_continue_while_each_etcd_member_is_killed_in_turn(
    breakable: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--pace-s", "0.02", "--until", str(until))
    pair = [nodes.run(breakable.endpoints, *steps, node=name, options=TWO) for name in ("a", "b")]
    record.wait("step", count=2, step=5)
    for member in (breakable.etcd.leader(), *breakable.etcd.followers()):
        member.kill()
        steps_after(record, time.monotonic(), 10, ranks=2)
        member.restart()
        breakable.etcd.wait_healthy()
    same_generation(record, ranks=2)
    finish(until, *pair)


@pytest.mark.timeout(180)
def test_a_frozen_leader_is_replaced_while_training_goes_on(
    breakable: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    steps = ("steps", "--pace-s", "0.02", "--until", str(until))
    pair = [nodes.run(breakable.endpoints, *steps, node=name, options=TWO) for name in ("a", "b")]
    record.wait("step", count=2, step=5)
    leader, epoch = breakable.leader(), breakable.status().leader_epoch
    leader.child.pause()
    try:
        others = ",".join(c.address for c in breakable.coordinators if c is not leader)
        steps_after(record, time.monotonic(), 10, ranks=2)
        deadline = time.monotonic() + LIMIT_S
        with CoordinatorClient.connect(others) as client:
            while client.status().leader_epoch <= epoch:
                assert time.monotonic() < deadline, "nobody took over from a frozen leader"
    finally:
        leader.child.resume()
    steps_after(record, time.monotonic(), 10, ranks=2)
    same_generation(record, ranks=2)
    finish(until, *pair)
