"""torchrun with Strata's rendezvous: real agents, real coordinators, real gloo."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import JOB_PHASE_FAILED, JOB_PHASE_RUNNING, ListGenerationsRequest
from tests.cluster_fixtures import RANKS, Nodes, StartCluster
from tests.processes import LIMIT_S, Event, Record, Talker
from tests.torchrun_agents import agent

OUTAGE_S = 30.0
START_S = 90.0
"""Limit for the first event: agents and their workers import torch first, several at a time on two cores."""

pytestmark = pytest.mark.usefixtures("torch_installed")


def starts(record: Record, generation: int, count: int) -> dict[int, Event]:
    """Return the start events of one generation by rank, once all are recorded."""
    return {e["rank"]: e for e in record.wait("start", count=count, generation=generation, limit_s=START_S)}


def finish(until: Path, *agents: Talker) -> None:
    """Let the workers end; assert that all agents exit with 0 and leave no process."""
    until.touch()
    assert [one.join(LIMIT_S) for one in agents] == [0] * len(agents)
    for one in agents:
        one.wait_quiet()


@pytest.mark.timeout(180)
@pytest.mark.journey
def test_a_killed_worker_starts_a_generation_and_gloo_uses_a_fresh_store(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    elastic = ("elastic", str(until))
    pair = [agent(nodes, cluster.endpoints, tmp_path, *elastic, name=name, nnodes="2") for name in "ab"]
    first = starts(record, 1, 2)
    record.wait("step", count=2, step=2, generation=1)
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = starts(record, 2, 2)
    record.wait("step", count=2, step=2, generation=2)
    assert {r: e["agent"] for r, e in second.items()} == {r: e["agent"] for r, e in first.items()}
    reasons = {e["reason"] for e in record.of("world.joining", generation=2)}
    assert len(reasons) == 1, "of the killed one, or of another that lost it"
    assert "failed (" in reasons.pop()
    finish(until, *pair)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_survives_lost_workers_agents_and_all_coordinators(
    start_cluster: StartCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    cluster = start_cluster(etcd_members=1, coordinators=3)
    until = tmp_path / "until"
    agents: dict[str, Talker] = {}

    def start(name: str) -> None:
        steps = ("steps", "--no-barrier", "--until", str(until))
        agents[name] = agent(nodes, cluster.endpoints, tmp_path, *steps, name=name, nnodes="2:3")

    def lose(name: str) -> None:
        lost = agents.pop(name)
        lost.signal(signal.SIGKILL)
        lost.wait_quiet()  # the agent's worker ends too

    for name in "abc":
        start(name)
    world = world_of(record, 0, "abc")

    # a worker is killed twice: every agent keeps its rank
    for _ in range(2):
        before, world = world, after_worker_died(record, world)
        assert places(world) == places(before)

    # an agent is killed, and a new agent joins: the other agents get both changes
    lose(world[2]["worker"])
    world = world_of(record, generation_of(world), agents)
    start("d")
    world = world_of(record, generation_of(world), agents)

    # rank 0's agent is killed: a spare takes its place, and another agent serves the store
    start("e")
    record.wait_one("world.waiting", source="e", limit_s=START_S)
    lose(world[0]["worker"])
    world = world_of(record, generation_of(world), agents)

    # all coordinators are down: no worker is restarted, and the death of a worker is reported afterwards
    start("f")
    record.wait_one("world.waiting", source="f", limit_s=START_S)
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
    assert max(e["generation"] for e in record.of("start")) == generation_of(world)
    os.kill(world[1]["pid"], signal.SIGKILL)
    for coordinator in cluster.coordinators:
        coordinator.restart()
    spare = agents["f"]
    before, world = world, world_of(record, generation_of(world), [e["worker"] for e in world.values()])
    assert places(world) == places(before)

    # the job is done, and the spare agent ends too
    record.wait("step", count=3, step=2, generation=generation_of(world))
    finish(until, *agents.values())
    assert record.of("start", worker=spare.name) == []


def generation_of(world: Mapping[int, Event]) -> int:
    return int(world[0]["generation"])


def places(world: Mapping[int, Event]) -> dict[int, str]:
    return {rank: str(event["worker"]) for rank, event in world.items()}


def after_worker_died(record: Record, world: Mapping[int, Event]) -> dict[int, Event]:
    """Kill rank 1 once all ranks made a step; return the start events of the same agents' next world."""
    record.wait("step", count=len(world), step=2, generation=generation_of(world))
    os.kill(world[1]["pid"], signal.SIGKILL)
    return world_of(record, generation_of(world), places(world).values())


def world_of(record: Record, before: int, workers: Iterable[str]) -> dict[int, Event]:
    """Return the start events by rank of a generation after `before` that consists of exactly these agents."""
    wanted = set(workers)

    def found(events: list[Event]) -> dict[int, Event]:
        starts = [e for e in events if e["event"] == "start"]
        newest = max((e["generation"] for e in starts), default=0)
        there = {e["rank"]: e for e in starts if e["generation"] == newest}
        return there if newest > before and {e["worker"] for e in there.values()} == wanted else {}

    return record.until(f"a world of {sorted(wanted)}", found, limit_s=START_S)


@pytest.mark.timeout(180)
def test_workers_that_use_the_library_are_found_frozen_and_stop_together_on_a_signal(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    training = ("training", "--storage", str(tmp_path / "checkpoints"), "--epochs", "1000")
    two = ("--nproc-per-node=2",)
    alone = agent(nodes, cluster.endpoints, tmp_path, *training, name="a", nnodes="1", options=two)

    def begun(generation: int) -> dict[int, Event]:
        there = record.wait("begun", count=2, generation=generation, limit_s=START_S)
        record.wait("step", count=2, generation=generation)
        return {e["rank"]: e for e in there}

    # torchrun ends the other worker by SIGTERM; this must not count as a preemption
    os.kill(begun(1)[1]["pid"], signal.SIGKILL)
    # the agent kills a worker that no longer answers, so that torchrun sees the worker's exit
    os.kill(begun(2)[0]["pid"], signal.SIGSTOP)
    begun(3)
    record.wait("step", count=2, step=50, generation=3)  # by now the agent knows: both support graceful stop
    # a scheduler's SIGTERM: both workers stop after the same step, which is saved
    alone.signal(signal.SIGTERM)
    assert alone.join(START_S) == 75
    alone.wait_quiet()
    steps = {rank: record.of("step", generation=3, rank=rank)[-1]["step"] for rank in (0, 1)}
    assert steps[0] == steps[1]
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        job = client.job_status()
        assert (job.phase, job.latest_step) == (JOB_PHASE_RUNNING, steps[0])
        reasons = [one.world.reason for one in client.call(ListGenerationsRequest(job=nodes.job)).generations]
    assert any("rank 1 of a failed (was ended by SIGKILL)" in reason for reason in reasons)
    assert any(
        "rank 0 of a failed (frozen: a signal has stopped its process for 2 s)" in reason
        for reason in reasons
    )


@pytest.mark.timeout(180)
def test_workers_that_exit_with_0_after_a_stop_do_not_finish_the_job(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    stopping = ("stopping", "--storage", str(tmp_path / "checkpoints"), "--ends-well")
    one = agent(nodes, cluster.endpoints, tmp_path, *stopping, name="a", nnodes="1")
    record.wait_one("training", limit_s=START_S)
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        client.stop("preempt", grace_s=20.0)
        assert one.join(START_S) == 75
        assert client.job_status().phase == JOB_PHASE_RUNNING


@pytest.mark.timeout(180)
def test_agents_without_restarts_left_still_leave_one_by_one_on_request(
    start_cluster: StartCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    # this test is about stops: no worker may count as frozen, however slow the machine is
    cluster = start_cluster(coordinators=1, detect_s=15.0)
    training = ("training", "--storage", str(tmp_path / "checkpoints"), "--epochs", "1000")
    more: Any = {"nnodes": "1:2", "options": ("--max-restarts=1", "--rdzv-conf=settle_s=5")}
    env = {"STRATA_TRAIN_PREEMPT": "member"}
    a, b = (agent(nodes, cluster.endpoints, tmp_path, *training, name=n, env=env, **more) for n in "ab")

    def begun(generation: int, count: int) -> dict[str, Event]:
        there = record.wait("begun", count=count, generation=generation, limit_s=START_S)
        record.wait("step", count=count, generation=generation)
        return {e["worker"]: e for e in there}

    os.kill(begun(1, 2)["a"]["pid"], signal.SIGKILL)  # this death uses the only restart
    second = begun(2, 2)
    record.wait("step", count=2, step=second["a"]["step"] + 50, generation=2)
    # by now the agent knows that its worker supports a graceful stop
    a.signal(signal.SIGTERM)
    assert a.join(START_S) == 75
    alone = begun(3, 1)["b"]
    assert alone["step"] == record.of("step", generation=2, rank=0)[-1]["step"], (
        "both saved the step after which they stopped"
    )
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        client.stop("preempt", grace_s=20.0)
        assert b.join(START_S) == 75
        assert client.job_status().phase == JOB_PHASE_RUNNING
        generations = client.call(ListGenerationsRequest(job=nodes.job)).generations
        last = max(generations, key=lambda one: one.world.generation)
        assert "preempted" in last.world.reason
        assert not last.failure


def test_an_agent_that_would_give_up_at_the_first_failure_is_refused(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    no_restarts = ("--max-restarts=0",)
    refused = agent(nodes, cluster.endpoints, tmp_path, "steps", name="a", nnodes="1", options=no_restarts)
    assert refused.join(START_S) == 1
    record.wait_line("--max-restarts is 0: the first failure of any worker would end every agent for good")
    refused.wait_quiet()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_hung_worker_is_named_with_its_stack_and_evicted_if_configured(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    one = agent(
        nodes,
        cluster.endpoints,
        tmp_path,
        "hanging",
        name="a",
        nnodes="1",
        options=("--nproc-per-node=3",),
        env={"STRATA_RUN_STALL_LIMITS": "step=4", "STRATA_RUN_ON_STALL": "evict"},
    )
    events = record.wait("rank.stalled", count=3, generation=1, limit_s=START_S)
    assert {e["rank"]: "fetch_from_a_dead_disk" in e["stack"] for e in events} == {
        0: False,
        1: True,
        2: False,
    }
    assert record.wait_one("rank.killed")["rank"] == 1
    record.wait("end", count=3, generation=2, limit_s=START_S)
    assert one.join(LIMIT_S) == 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_agent_numbers_the_workers_of_its_role(
    cluster: LocalCluster, nodes: Nodes, record: Record
) -> None:
    roles = {"a": ("master", 1), "b": ("trainer", 2), "c": ("trainer", 1)}
    for name, (role, workers) in roles.items():
        nodes.start(
            sys.executable,
            str(RANKS / "role_agent.py"),
            *("--endpoints", cluster.endpoints, "--job", nodes.job, "--agents", "3"),
            *("--role", role, "--workers", str(workers)),
            name=name,
        )
    found = record.wait("place", count=4, limit_s=START_S)
    assert sorted(e["rank"] for e in found) == ["0", "1", "2", "3"]
    assert {e["world_size"] for e in found} == {"4"}
    by_role = {
        role: sorted((e["role_rank"], e["role_world_size"]) for e in found if e["role_name"] == role)
        for role in ("master", "trainer")
    }
    assert by_role == {"master": [("0", "1")], "trainer": [("0", "3"), ("1", "3"), ("2", "3")]}
    assert [one.join(LIMIT_S) for one in nodes.talkers] == [0, 0, 0]


@pytest.mark.timeout(120)
def test_a_configuration_error_is_not_retried(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    nobody = {name: None for name in os.environ if name.startswith("AWS_")}
    nowhere = {name: str(tmp_path / "none") for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")}
    one = agent(
        nodes,
        cluster.endpoints,
        tmp_path,
        "mistaken",
        *("--storage", "s3://bucket/runs"),
        name="a",
        nnodes="1",
        env=nobody | nowhere | {"AWS_EC2_METADATA_DISABLED": "true"},
    )
    assert one.join(START_S) != 0
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        job = client.job_status()
    assert (job.phase, job.world.generation) == (JOB_PHASE_FAILED, 1)
    assert job.phase_reason.startswith(
        "mend this, and run the command again: rank 0 of a failed (ConfigError: "
    )
