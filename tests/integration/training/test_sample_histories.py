"""Random histories of a training on real processes: each sample of an epoch is in exactly one committed step.

Ranks, agents and the leading coordinator are killed by SIGKILL, and nodes of other sizes join, at random moments. To run
fifty histories:

    STRATA_HISTORIES=50 make test-all ARGS="-k sample_histories"
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.core.exit_codes import REFUSED
from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes, StartCluster
from tests.integration.training.test_training import check_samples
from tests.processes import LIMIT_S, Event, Record, Talker

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

HISTORIES = int(os.environ.get("STRATA_HISTORIES", "3"))
EPOCHS = 4
EVENTS = 5
OPTIONS = (
    *("--min-workers", "1", "--max-workers", "4", "--settle-s", "0.3"),
    *("--max-no-progress-generations", "100"),  # kills may come before any save
)
STEPS_S = 60.0
"""How long a world may take to train a step: eight processes start on two cores."""


@pytest.fixture(scope="module")
def three(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(etcd_members=1, coordinators=3)


class History:
    """One training, and the events that befall it."""

    def __init__(self, cluster: LocalCluster, nodes: Nodes, record: Record, folder: Path, seed: int) -> None:
        self.rng = random.Random(f"samples/{seed}")
        self.record = record
        self._cluster = cluster
        self._nodes = nodes
        self._with_workers = seed % 3 == 2
        self._most = 4 if self._with_workers else self.rng.choice((2, 3, 24))
        """Samples that a rank takes at once. All nodes of a job run the same command."""
        self._folder = folder
        self._slots: dict[str, int] = {}
        self.running: dict[str, Talker] = {}

    def start(self, slots: int) -> None:
        """Start a node."""
        name = f"n{len(self._slots)}"
        self._slots[name] = slots
        arguments = [
            "--storage",
            str(self._folder),
            "--epochs",
            str(EPOCHS),
            "--every",
            "4",
            "--pace-s",
            "0.05",
            "--most",
            str(self._most),
        ]
        arguments += ["--workers", "1"] if self._with_workers else []
        self.running[name] = self._nodes.run(
            self._cluster.endpoints,
            "training",
            *arguments,
            node=name,
            options=(*OPTIONS, "--slots", str(slots)),
            env={"STRATA_TRAIN_KEEP_COUNT": "0"},
        )

    @property
    def ranks(self) -> int:
        return sum(self._slots[name] for name in self.running)

    def trains_on(self) -> list[Event]:
        """Return what the ranks of the newest generation said when they began, once a further step is trained."""
        known = len(self.record.of("step")) + len(self.record.of("end"))
        self.record.until("a further step", lambda events: self._steps(events)[known:], limit_s=STEPS_S)
        time.sleep(self.rng.uniform(0.0, 0.4))
        newest = max(e["generation"] for e in self.record.of("step"))
        return self.record.of("begun", generation=newest)

    @staticmethod
    def _steps(events: list[Event]) -> list[Event]:
        return [e for e in events if e["event"] in {"step", "end"}]

    def kill_rank(self, begun: list[Event]) -> None:
        alive = [e for e in begun if e["worker"] in self.running]
        if alive:
            with suppress(ProcessLookupError):  # its generation has just ended
                os.kill(self.rng.choice(alive)["pid"], signal.SIGKILL)

    def kill_agent(self, _begun: list[Event]) -> None:
        if len(self.running) > 1:
            self.running.pop(self.rng.choice(sorted(self.running))).child.kill()

    def join(self, _begun: list[Event]) -> None:
        if len(self.running) < 4 and self.ranks < 8:
            self.start(self.rng.randint(1, 2 if self._with_workers else 3))

    def kill_leader(self, _begun: list[Event]) -> None:
        with CoordinatorClient.connect(self._cluster.endpoints, timeout_s=LIMIT_S) as client:
            leader = client.status().leader
        for coordinator in self._cluster.coordinators:
            if leader.startswith(coordinator.name):
                coordinator.child.kill()
                coordinator.restart()


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_each_sample_is_in_one_committed_step(
    seed: int, three: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    history = History(three, nodes, record, tmp_path, seed)
    for slots in (1, 1) if seed % 3 == 2 else (3, 2, 2, 1):
        history.start(slots)
    deck = [
        history.kill_rank,
        history.kill_agent,
        history.kill_agent,
        history.join,
        history.join,
        history.kill_leader,
    ]
    history.rng.shuffle(deck)
    for event in deck[:EVENTS]:
        event(history.trains_on())
    codes = {node.join(2 * STEPS_S) for node in history.running.values()}
    assert 0 in codes
    assert codes <= {0, REFUSED}, "a node that joins after the job's end is told so"
    check_samples(record, epochs=EPOCHS)
    for coordinator in three.coordinators:
        coordinator.wait_ready(LIMIT_S)
