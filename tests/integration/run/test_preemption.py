"""Preemption of a real job: all ranks save and stop after the same step, with exit codes for schedulers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import JOB_PHASE_RUNNING, GetJobRequest
from tests.cluster_fixtures import RANKS, Nodes
from tests.processes import LIMIT_S, Event, Record, Talker

pytestmark = pytest.mark.timeout(300)
"""The limit is long, because most tests start several worlds in sequence; it only ends a test that hangs."""
ROUNDS = 20
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Training:
    """A job of three ranks on one or three nodes, restarted as a scheduler does."""

    def __init__(self, cluster: LocalCluster, nodes: Nodes, record: Record, folder: Path) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._record = record
        self._folder = folder
        self._received = 0

    def ask(self, *words: str) -> None:
        """Run a `strata jobs` command for this job; assert that it succeeds."""
        asking = self._nodes.strata(
            "jobs", words[0], self._nodes.job, *words[1:], "-e", self._cluster.endpoints, name="jobs"
        )
        assert asking.join() == 0

    def standalone(self, number: int, count: int, **environment: str) -> Talker:
        """Start one of `count` standalone trainers."""
        return self._python("stopping", count, STRATA_WORKER_ID=f"standalone-{number}", **environment)

    def rounds(self, rounds: int, count: int) -> Talker:
        """Start `count` standalone trainers `rounds` times, each time after all have ended."""
        return self._python("rounds", count, "--rounds", str(rounds))

    def _python(self, script: str, count: int, *words: str, **environment: str) -> Talker:
        environment |= {"STRATA_ENDPOINTS": self._cluster.endpoints, "STRATA_JOB": self._nodes.job}
        return self._nodes.start(
            *(sys.executable, str(RANKS / f"{script}.py"), "--storage", str(self._folder)),
            *("--min-workers", str(count), *words),
            name=script,
            env=environment,
        )

    def mark(self, *, after: Event | None = None) -> None:
        """Make `heard` ignore all events until now, or up to and including the event `after`."""
        events = self._record.events
        self._received = len(events) if after is None else events.index(after) + 1

    def start(
        self,
        *slots: int,
        options: tuple[str, ...] = (),
        needed: int | None = None,
        arguments: tuple[str, ...] = (),
    ) -> list[Talker]:
        """Start one node for each number of slots; the job needs all of these nodes, or `needed` nodes."""
        self.mark()
        size = ("--min-workers", str(needed or len(slots)), "--no-warm", *options)
        return [
            self._nodes.run(
                self._cluster.endpoints,
                "stopping",
                *("--storage", str(self._folder), *arguments),
                node=f"node-{number}",
                options=("--slots", str(count), *size),
            )
            for number, count in enumerate(slots)
        ]

    def received(self, kind: str, *, count: int = 3) -> list[Event]:
        """Return at least `count` events of one kind since the last mark, sorted by rank."""

        def enough(events: list[Event]) -> list[Event]:
            chosen = [e for e in events[self._received :] if e["event"] == kind]
            return chosen if len(chosen) >= count else []

        events = self._record.until(f"{count} x {kind}", enough)
        return sorted(events, key=lambda event: int(event["rank"]))


@pytest.fixture
def training(cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path) -> Training:
    return Training(cluster, nodes, record, tmp_path / "storage")


def stopped_together(events: list[Event]) -> int:
    """Assert that all ranks stopped after the same step with the same sum; return the step."""
    (step,) = {event["step"] for event in events}
    assert all(event["sum"] == step * (step + 1) / 2 for event in events)
    return int(step)


@pytest.mark.journey
def test_a_signal_to_one_rank_of_three_stops_all_after_one_saved_step(training: Training) -> None:
    """Each of twenty consecutive runs starts at exactly the step at which the previous run stopped."""
    trainers = training.rounds(ROUNDS, 3)
    saved = 0
    for number in range(ROUNDS):
        begun = training.received("start")
        assert {event["step"] for event in begun} == {saved}, f"round {number} began elsewhere"
        training.received("training")
        os.kill(begun[number % 3]["pid"], SIGNALS[number % 2])
        (ended,) = training.received("round", count=1)
        assert ended["codes"] == [75, 75, 75], f"round {number}"
        saved = stopped_together(training.received("preempted"))
        training.mark(after=ended)
    assert trainers.join() == 0


def test_a_signal_to_a_rank_ends_the_whole_run_with_75(training: Training) -> None:
    """Under `strata run`, with SIGTERM and with SIGUSR1, which schedulers send as an early notice."""
    saved = 0
    for number in SIGNALS:
        (node,) = training.start(3)
        begun = training.received("start")
        assert {event["step"] for event in begun} == {saved}
        training.received("training")
        os.kill(begun[1]["pid"], number)
        assert node.join() == 75
        saved = stopped_together(training.received("preempted"))


def test_members_drain_pause_and_leave_by_command_or_signal(training: Training) -> None:
    """Each time the ranks that remain or start next go on from the step at which all had stopped."""
    nodes = training.start(1, 1, 1, options=("--max-workers", "3"), needed=2)
    training.received("training")

    training.mark()
    training.ask("drain", "node-1", "--reason", "its fan is broken")
    assert nodes[1].join() == 75
    (drained,) = training.received("preempted", count=1)
    begun = training.received("start", count=2)
    assert {event["step"] for event in begun} == {drained["step"]}, "the two that are left go on from there"

    training.mark()
    training.ask("pause", "--wait")
    training.ask("resume")
    (paused,) = {event["step"] for event in training.received("start", count=2)}
    assert paused > drained["step"], "their ranks saved where they stopped, and waited there for their agent"

    training.received("training", count=2)
    training.mark()
    nodes[2].signal(signal.SIGTERM)
    assert (nodes[0].join(), nodes[2].join()) == (75, 75)
    stopped_together(training.received("preempted", count=2))


def test_ranks_that_poll_their_manager_stop_together_under_an_agent(
    training: Training, cluster: LocalCluster, nodes: Nodes, tmp_path: Path
) -> None:
    """`should_save` and `reached_preemption` return True on all ranks at the same step, before any signal."""
    reached = 0
    for _ in range(2):
        training.mark()
        node = nodes.run(
            cluster.endpoints,
            "asking",
            *("--storage", str(tmp_path)),
            options=("--slots", "3", "--no-warm"),
        )
        assert {event["step"] for event in training.received("start")} == {reached}
        training.received("training")
        training.ask("preempt")
        assert node.join() == 75
        ((reached, latest),) = {(event["step"], event["latest"]) for event in training.received("stopped")}
        assert latest == reached


def test_standalone_trainers_stop_together(training: Training) -> None:
    started = [training.standalone(number, 2) for number in range(2)]
    training.received("training", count=2)
    started[0].signal(signal.SIGTERM)
    assert [trainer.join() for trainer in started] == [75, 75]
    stopped_together(training.received("preempted", count=2))


def test_standalone_trainers_preempted_together_leave_without_a_failure(
    training: Training, cluster: LocalCluster, job: str
) -> None:
    """Each of the two reports that only its own member must leave; the third trainer ends with its generation."""
    started = [training.standalone(number, 3, STRATA_TRAIN_PREEMPT="member") for number in range(3)]
    training.received("training")
    for trainer in started[:2]:
        trainer.signal(signal.SIGTERM)
    assert [trainer.join() for trainer in started[:2]] == [75, 75]
    with CoordinatorClient.connect(cluster.endpoints, job=job, timeout_s=LIMIT_S) as client:
        client.call_until(GetJobRequest(job=job), lambda answer: bool(answer.job.world.generation > 1))
        generations = client.generations()
    assert generations[0].world.forming
    assert [each.failure for each in generations] == [False] * len(generations)
    assert "drained: SIGTERM to rank" in generations[-2].world.reason
    assert started[2].join() == 75


def test_a_preempted_script_that_exits_with_0_does_not_finish_the_job(
    training: Training, cluster: LocalCluster, job: str
) -> None:
    nodes = training.start(1, 1, options=("--max-workers", "2"), needed=1, arguments=("--ends-well",))
    training.received("training", count=2)
    training.ask("drain", "node-1")
    assert nodes[1].join() == 75
    training.mark()
    training.received("training", count=1)
    training.ask("preempt")
    assert nodes[0].join() == 75
    with CoordinatorClient.connect(cluster.endpoints, job=job, timeout_s=LIMIT_S) as client:
        assert client.job_status().phase == JOB_PHASE_RUNNING


@pytest.mark.usefixtures("torch_installed")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.journey
def test_workers_survive_a_signal_to_the_whole_group(
    nodes: Nodes, record: Record, tmp_path: Path, method: str
) -> None:
    """The rank draws its last batches from the workers and saves; then the workers end by themselves."""
    rank = nodes.start(
        *(sys.executable, str(RANKS / "loading.py"), "--storage", str(tmp_path), "--method", method),
        name="rank",
        env={"STRATA_SOCKET": None, "STRATA_ENDPOINTS": None},
    )
    assert len(record.wait_one("training")["workers"]) == 1
    os.killpg(rank.pid, signal.SIGTERM)
    assert rank.join() == 75
    record.wait_one("preempted")  # the event is not an error about a killed worker
    rank.wait_quiet()
