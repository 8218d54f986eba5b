"""A stalled rank is named with its stack by every replica, and evicted if configured."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import NotFound
from strata.v1.members_pb2 import RankProgress
from tests.cluster_fixtures import Nodes, StartCluster, shown
from tests.processes import LIMIT_S

OPTIONS = ("--slots", "3", "--stall-limits", "step=4")
"""The stall limit is longer than any stall of a healthy rank on a busy machine."""


def stalled(endpoint: str, job: str) -> dict[int, RankProgress]:
    """Return the stalled ranks once the replica at `endpoint` names all three."""
    deadline = time.monotonic() + LIMIT_S
    with CoordinatorClient.connect(endpoint, job=job) as client:
        while True:
            ranks = [rank for member in client.members() for rank in member.ranks]
            found = {rank.rank: rank for rank in ranks if rank.stalled_ms}
            if len(found) == 3:
                return found
            assert time.monotonic() < deadline, ranks
            time.sleep(0.05)  # the report reaches the peers within a second


def test_a_hung_rank_is_named_with_its_phase_and_stack(cluster: LocalCluster, nodes: Nodes) -> None:
    nodes.run(cluster.endpoints, "hanging", options=OPTIONS)
    nodes.record.wait_one("hangs")
    events = nodes.record.wait("rank.stalled", count=3)
    assert {event["rank"]: "fetch_from_a_dead_disk" in event["stack"] for event in events} == {
        0: False,
        1: True,
        2: False,
    }
    for endpoint in cluster.endpoints.split(","):
        ranks = stalled(endpoint, nodes.job)
        assert (ranks[1].step, ranks[1].phase) == (5, "step")
        assert "in fetch_from_a_dead_disk" in ranks[1].stack
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        diagnosis = client.job_status().diagnosis
    assert re.fullmatch(
        r"rank 1 on host \S+ stands still at step 5 \(step\) for \d+ s, and 2 more with it:"
        r" in its own code in fetch_from_a_dead_disk \(hanging\.py\)",
        diagnosis,
    ), "the others wait for it"
    where = ("--endpoints", cluster.endpoints)
    members = shown("STALLED: 0-2 for", "members", *where, "--job", nodes.job, "--stacks", "--devices")
    assert "rank 1 of node-1 stands still at step 5, step for" in members
    assert "in fetch_from_a_dead_disk" in members
    shown(f"{nodes.job}: {diagnosis.partition(' stands still')[0]}", "status", *where)


@pytest.mark.slow
def test_a_hung_rank_is_evicted_and_the_job_continues(cluster: LocalCluster, nodes: Nodes) -> None:
    node = nodes.run(cluster.endpoints, "hanging", options=(*OPTIONS, "--on-stall", "evict"))
    assert node.join() == 0
    (killed,) = nodes.record.of("rank.killed")
    assert killed["rank"] == 1, "not one of those that waited for it"
    assert killed["reason"].startswith("stalled: no progress at step 5 (step)")
    assert [end["generation"] for end in nodes.record.of("end")] == [2, 2, 2]


@pytest.mark.slow
def test_a_stalled_job_continues_after_a_pause_without_a_save(cluster: LocalCluster, nodes: Nodes) -> None:
    """The test runs the commands of docs/operate/stuck-job.md."""
    node = nodes.run(cluster.endpoints, "hanging", options=OPTIONS)
    nodes.record.wait("rank.stalled", count=3)
    where = ("--endpoints", cluster.endpoints)
    reason = ("--reason", "rank 1 stands still")
    shown(f"{nodes.job} is paused", "jobs", "pause", nodes.job, "--now", "--wait", *reason, *where)
    shown(f"{nodes.job} is resumed", "jobs", "resume", nodes.job, *where)
    assert node.join() == 0
    assert len(nodes.record.of("end")) == 3
    assert min(end["generation"] for end in nodes.record.of("end")) > 1


def test_the_rank_that_all_others_wait_for_is_shown_as_slow(
    cluster: LocalCluster, nodes: Nodes, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    arguments = ("straggling", str(tmp_path / "storage"), str(until))
    node = nodes.run(cluster.endpoints, *arguments, options=("--slots", "4"))
    deadline = time.monotonic() + LIMIT_S
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        while not (diagnosis := output_of(client)).startswith("rank 2 on host "):
            assert time.monotonic() < deadline, diagnosis
            time.sleep(0.05)  # until the rank has made a few steps
        (member,) = client.members()
    own_us = {rank.rank: rank.median_step_us for rank in member.ranks}
    assert own_us[2] > 100_000 > max(own for rank, own in own_us.items() if rank != 2), (
        "though all step alike"
    )
    assert re.search(
        r" takes \d+\.\d times the median for a step: slow data loading, \d+ ms more a step$", diagnosis
    )
    own_times = {rank.rank: rank.step_times for rank in member.ranks}
    assert own_times[2].median_data_wait_us > 90_000 > 10 * own_times[2].median_compute_us
    until.touch()
    assert node.join() == 0


@pytest.mark.slow
def test_a_blocked_loader_and_a_suspended_rank_are_diagnosed_before_a_stall(
    start_cluster: StartCluster, nodes: Nodes, tmp_path: Path
) -> None:
    # with a shorter time the agent would kill a stopped rank first
    patient = start_cluster(coordinators=2, detect_s=10.0)
    block, until = tmp_path / "block", tmp_path / "until"
    arguments = ("stuck", str(tmp_path / "storage"), str(block), str(until))
    node = nodes.run(patient.endpoints, *arguments, options=("--slots", "4"))
    trains = nodes.record.wait("trains", count=4)
    with CoordinatorClient.connect(patient.endpoints, job=nodes.job) as client:
        block.touch()
        diagnosis = wait_for(client, "and 3 more with it: waiting for the data loader")
        assert re.fullmatch(
            r"rank 2 on host \S+ stands still at step \d+ \(step\) for \d s, and 3 more with it:"
            r" waiting for the data loader in read_shard \(stuck\.py\)",
            diagnosis,
        )
        assert not client.job_status().suspects, "it is no stall yet: nobody is evicted for it"
        block.unlink()
        wait_for(client, "")
        (stopped,) = [event["pid"] for event in trains if event["rank"] == 1]
        os.kill(stopped, signal.SIGSTOP)
        # the agent detects each of the four stalls separately
        diagnosis = wait_for(client, "and 3 more with it: stopped by a signal")
        os.kill(stopped, signal.SIGCONT)
        assert re.match(r"rank 1 on host \S+ stands still at step \d+ \(step\) for \d s, and", diagnosis)
        wait_for(client, "")
    until.touch()
    assert node.join() == 0


def wait_for(client: CoordinatorClient, words: str) -> str:
    """Return the job's diagnosis once it contains `words`; if `words` is empty, wait until there is no diagnosis."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        diagnosis = output_of(client)
        if (words and words in diagnosis) or not (words or diagnosis):
            return diagnosis
        assert time.monotonic() < deadline, diagnosis
        time.sleep(0.05)  # until the agent has examined the rank


def output_of(client: CoordinatorClient) -> str:
    """Return the job's diagnosis, or "" while the job does not exist."""
    try:
        return client.job_status().diagnosis
    except NotFound:
        return ""
