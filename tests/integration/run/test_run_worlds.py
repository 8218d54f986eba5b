"""Agents follow operators' requests for their job: grow, shrink, pause, resume, drain one agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.cli.console.exits import Exit
from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import JOB_PHASE_PAUSED, GetJobRequest, GetJobResponse
from tests.cluster_fixtures import Nodes
from tests.processes import LIMIT_S, Event, Record

OPTIONS = ("--min-workers", "2", "--max-workers", "2", "--settle-s", "0.3", "--no-warm")


def trains(record: Record, generation: int, count: int) -> set[str]:
    """Return the members that train in that generation, once all of them do."""
    started: list[Event] = record.wait("start", count=count, generation=generation)
    record.wait("step", count=count, step=1, generation=generation)
    return {event["worker"] for event in started}


@pytest.mark.timeout(240)
def test_a_job_is_scaled_paused_resumed_and_drained_while_it_trains(
    cluster: LocalCluster, nodes: Nodes, record: Record, job: str, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    a, b, c = (
        nodes.run(cluster.endpoints, "steps", "--until", str(until), node=name, options=OPTIONS)
        for name in "abc"
    )
    first = trains(record, 1, 2)
    with CoordinatorClient.connect(cluster.endpoints, job=job, timeout_s=LIMIT_S) as client:
        client.scale(max_workers=3)
        assert trains(record, 2, 3) == {"a", "b", "c"}
        client.scale(min_workers=1, max_workers=1)
        (alone,) = trains(record, 3, 1)
        assert alone in first
        client.scale(max_workers=3)
        assert trains(record, 4, 3) == {"a", "b", "c"}

        client.stop("pause", reason="the file server moves")

        def paused(answer: GetJobResponse) -> bool:
            return answer.job.phase == JOB_PHASE_PAUSED

        assert paused(client.call_until(GetJobRequest(job=job), paused))
        client.resume()
        assert trains(record, 6, 3) == {"a", "b", "c"}

        client.stop("drain", worker_ids=["c"], reason="its fan is broken")
        assert c.join() == Exit.PREEMPTED
        assert trains(record, 7, 2) == {"a", "b"}
        reasons = [each.world.reason for each in client.generations()]
    assert reasons[0] == "c drained: its fan is broken; its ranks had not begun"
    assert reasons[2] == "paused: the file server moves; its ranks had not begun"
    assert "the job takes 1 members now" in reasons[4]
    until.touch()
    assert (a.join(), b.join()) == (0, 0)
    for node in (a, b, c):
        node.wait_quiet()
