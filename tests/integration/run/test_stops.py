"""Notices in unusual phases and with long steps: after each notice the newest step must be committed as a checkpoint.

`STRATA_STOPS` is the number of notices in each phase (default: 1); with STRATA_STOPS=10 there are sixty in all.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.processes import LIMIT_S, Event, Record

pytestmark = [pytest.mark.timeout(3600), pytest.mark.slow]
ROUNDS = int(os.environ.get("STRATA_STOPS", "1"))
GRACE_S = 30


def received(record: Record, since: int, kind: str, count: int) -> list[Event]:
    def enough(events: list[Event]) -> list[Event]:
        chosen = [event for event in events[since:] if event["event"] == kind]
        return chosen if len(chosen) >= count else []

    return record.until(f"{count} x {kind}", enough)


@pytest.mark.parametrize(
    ("phase", "pace_s"),
    [
        ("restore", 0.05),
        ("warm-up", 0.05),
        ("compile", 0.05),
        ("evaluation", 0.05),
        ("save", 0.05),
        ("step", 0.1),
        ("step", 5.0),
    ],
)
def test_a_notice_in_any_phase_ends_in_a_checkpoint_of_the_newest_step(
    phase: str, pace_s: float, cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    """One of three ranks gets SIGTERM; before `strata.init` has returned, its agent gets the signal instead.

    No step may be lost.
    """
    saved = 0
    for number in range(ROUNDS + (phase == "restore")):
        since, first = len(record.events), phase == "restore" and number == 0
        node = nodes.run(
            cluster.endpoints,
            "odd_phases",
            *("--storage", str(tmp_path / "storage"), "--pace-s", str(pace_s)),
            *("--phase", "step" if first else phase),  # the first run has no checkpoint to restore
            options=("--slots", "3", "--no-warm", "--preempt-grace-s", str(GRACE_S)),
        )
        (reached, *_) = received(record, since, "step" if first else phase, 1)
        begun = [event for event in record.events[since:] if event["event"] == "start"]
        if phase == "restore" and not first:
            node.signal(signal.SIGTERM)
        else:
            assert {event["step"] for event in begun} == {saved}, f"notice {number}: it began elsewhere"
            os.kill(reached["pid"], signal.SIGTERM)
        assert node.join() == 75, f"notice {number}"
        ended = [event for event in record.events[since:] if event["event"] == "preempted"]
        lost = [event for event in record.events[since:] if "SKIPPED" in str(event.get("text", ""))]
        assert not lost, f"notice {number}"
        if ended:
            (saved,) = {event["step"] for event in ended}
            assert all(event["sum"] == saved * (saved + 1) / 2 for event in ended)


def test_a_job_that_is_scaled_and_grows_by_a_newcomer_repeats_no_step(
    cluster: LocalCluster, nodes: Nodes, record: Record, job: str, tmp_path: Path
) -> None:
    """The job goes from three members to two, three and four.

    Each world begins at the step at which the previous world stopped.
    """

    def starts(node: str) -> None:
        nodes.run(
            cluster.endpoints,
            "stopping",
            *("--storage", str(tmp_path / "storage"), "--pace-s", "0.05"),
            node=node,
            options=("--min-workers", "2", "--max-workers", "3", "--settle-s", "0.5", "--no-warm"),
        )

    for node in "abc":
        starts(node)
    received(record, 0, "training", 3)
    with CoordinatorClient.connect(cluster.endpoints, job=job, timeout_s=LIMIT_S) as client:
        for size in (2, 3, 4):
            since = len(record.events)
            client.scale(max_workers=size)
            if size == 4:
                starts("d")
            begun = received(record, since, "start", size)
            stopped = {
                int(found[1])
                for event in record.events[since:]
                if (found := re.search(r"all ranks stop after step (\d+)", str(event.get("text", ""))))
            }
            assert {event["step"] for event in begun} == stopped, f"{size} members"
            received(record, since, "training", size)
        failures = [each.world.reason for each in client.generations() if each.failure]
    assert failures == []
