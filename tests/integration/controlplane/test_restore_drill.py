"""The restore drill: a training loses its control plane, gets it back, and goes on from the newest step in storage.

At the end of each drill, the training must have used every sample once, in the same steps as an undisturbed training.
To run ten of each drill:

    STRATA_DRILLS=10 make test-all ARGS="-k restore_drill"
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.checkpoints_pb2 import CHECKPOINT_STATE_COMMITTED
from tests.cluster_fixtures import Nodes, StartCluster, run_strata
from tests.integration.training.test_training import check_samples
from tests.polling import until
from tests.processes import LIMIT_S, Record
from tests.torchrun_agents import agent

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

DRILLS = int(os.environ.get("STRATA_DRILLS", "1"))
EPOCHS = 12
EVERY = 5
STEPS_AGAIN_S = 10.0
NOISE_S = 10.0
"""Additional seconds on a busy machine: four ranks and other processes do their imports on two cores."""


@dataclass(frozen=True, kw_only=True)
class Before:
    """The job's state when etcd was lost."""

    uid: str
    generation: int
    committed: frozenset[int]


class Drill:
    """A cluster with a training of two nodes, its backups and its storage. `by_torchrun`: two agents of torchrun."""

    def __init__(
        self,
        cluster: LocalCluster,
        nodes: Nodes,
        record: Record,
        folder: Path,
        *,
        by_torchrun: bool = False,
    ) -> None:
        self.cluster = cluster
        self.record = record
        self.storage = folder / "storage"
        self.backups = folder / "backups"
        self.older = folder / "older"
        self.backups.mkdir()
        self._folder = folder
        self._by_torchrun = by_torchrun
        self._nodes = nodes
        self._members = cluster.etcd.members

    # -- the training

    def train(self) -> None:
        """Start two nodes, for the first time or again."""
        for node in ("a", "b"):
            arguments = ("--storage", str(self.storage), "--epochs", str(EPOCHS), "--every", str(EVERY))
            training = ("training", *arguments, "--pace-s", "0.05")
            env = {"STRATA_TRAIN_KEEP_COUNT": "0"}
            if self._by_torchrun:
                agent(
                    self._nodes,
                    self.cluster.endpoints,
                    self._folder,
                    *training,
                    name=node,
                    nnodes="2",
                    options=("--max-restarts=1",),
                    env=env,
                )
                continue
            self._nodes.run(
                self.cluster.endpoints,
                *training,
                node=node,
                options=("--min-workers", "2"),
                env=env,
            )

    def until_committed(self, step: int) -> None:
        """Return once this step or a later one is committed."""
        self.record.wait("begun", count=2)
        with self._client() as client:
            until(lambda: max(self._committed(client), default=0) >= step)

    def before(self) -> Before:
        """Return the catalog immediately before etcd is lost.

        A commit is reported to trainers only once its marker is on storage, so wait for the markers.
        """
        with self._client() as client:
            committed = self._committed(client)
            markers = [f"step-{step:012d}-*/COMMIT" for step in committed]
            until(lambda: all(any(self.storage.rglob(marker)) for marker in markers))
            world = client.world()
            return Before(
                uid=world.token.uid,
                generation=world.world.generation,
                committed=frozenset(committed),
            )

    def goes_on(self, before: Before, restored_at: float) -> None:
        """Check that no committed checkpoint is missing, and that the training goes on by itself and ends correctly."""
        later = self.record.until(
            "a step in a generation after the restore",
            lambda events: [
                e for e in events if e["event"] == "step" and e["generation"] > before.generation
            ],
        )
        generation = later[0]["generation"]
        took_s = time.monotonic() - restored_at
        with self._client() as client:
            after = self._committed(client)
            answer = client.world()
        uid = answer.token.uid
        assert answer.world.generation > before.generation
        assert before.committed <= set(after), "a committed checkpoint is missing"
        assert uid != before.uid
        assert uid.partition(".")[0] == before.uid.partition(".")[0]
        begun = self.record.of("begun", generation=generation)
        assert min(e["step"] for e in begun) >= max(before.committed), (
            "it began from an older step than it could"
        )
        # torchrun's workers import torch anew, and may start twice
        limit_s = STEPS_AGAIN_S + (2 if self._by_torchrun else 1) * NOISE_S
        assert took_s < limit_s, f"a step came {took_s:.1f} s after the restore"
        running = self._nodes.talkers[-2:]
        assert [node.join() for node in running] == [0, 0]
        check_samples(self.record, epochs=EPOCHS)

    def stop_everything(self) -> None:
        """Kill coordinators and nodes."""
        for coordinator in self.cluster.coordinators:
            coordinator.child.kill()
        for talker in self._nodes.talkers:
            talker.child.kill()
            talker.join()

    def start_coordinators(self) -> None:
        for coordinator in self.cluster.coordinators:
            coordinator.restart()
        for coordinator in self.cluster.coordinators:
            coordinator.wait_ready(LIMIT_S)

    # -- etcd

    def lose_etcd(self, *, put_back: Path | None = None) -> None:
        """Wipe the data of every member; replace it with an older copy, if there is one."""
        self.cluster.etcd.kill()
        for member in self._members:
            shutil.rmtree(member.data)
            if put_back is not None:
                shutil.copytree(put_back / member.name, member.data)
        for member in self._members:
            member.start()
        self.cluster.etcd.wait_healthy()

    def copy_etcd(self) -> None:
        """Stop the members for a moment, and copy their data."""
        self.cluster.etcd.stop()
        for member in self._members:
            shutil.copytree(member.data, self.older / member.name)
            member.start()
        self.cluster.etcd.wait_healthy()

    # -- the commands

    def command(self, *words: str) -> str:
        """Run a command of `strata controlplane`; return its output."""
        etcd = ("--etcd", ",".join(self.cluster.etcd.endpoints))
        code, printed = run_strata("controlplane", *words, *etcd, limit_s=LIMIT_S)
        assert code == 0, printed
        return printed

    def _client(self) -> CoordinatorClient:
        return CoordinatorClient.connect(self.cluster.endpoints, job=self._nodes.job, timeout_s=LIMIT_S)

    @staticmethod
    def _committed(client: CoordinatorClient) -> list[int]:
        return [each.step for each in client.checkpoints() if each.state == CHECKPOINT_STATE_COMMITTED]


@pytest.fixture
def drill(start_cluster: StartCluster, nodes: Nodes, record: Record, tmp_path: Path) -> Drill:
    return Drill(start_cluster(coordinators=3), nodes, record, tmp_path)


@pytest.mark.parametrize("_number", range(DRILLS))
def test_restore_drill_under_running_agents(drill: Drill, _number: int) -> None:
    drill.train()
    drill.until_committed(2 * EVERY)
    drill.command("backup", "--to", str(drill.backups))
    drill.until_committed(5 * EVERY)
    before = drill.before()
    drill.lose_etcd()
    printed = drill.command("restore", "--from", str(drill.backups), "--storage", str(drill.storage), "--yes")
    drill.goes_on(before, time.monotonic())
    assert str(max(before.committed)) in printed


@pytest.mark.parametrize("_number", range(DRILLS))
def test_restore_drill_with_everything_restarted(drill: Drill, _number: int) -> None:
    drill.train()
    drill.until_committed(2 * EVERY)
    drill.command("backup", "--to", str(drill.backups))
    drill.until_committed(5 * EVERY)
    before = drill.before()
    drill.stop_everything()
    drill.lose_etcd()
    drill.command("restore", "--from", str(drill.backups), "--storage", str(drill.storage), "--yes")
    drill.start_coordinators()
    drill.train()
    drill.goes_on(before, time.monotonic())


@pytest.mark.parametrize("_number", range(DRILLS))
def test_restore_drill_of_an_older_snapshot_under_running_coordinators(drill: Drill, _number: int) -> None:
    drill.train()
    drill.until_committed(2 * EVERY)
    drill.copy_etcd()
    drill.until_committed(5 * EVERY)
    before = drill.before()
    drill.lose_etcd(put_back=drill.older)
    drill.command("restore", "--in-place", "--storage", str(drill.storage), "--yes")
    drill.goes_on(before, time.monotonic())


@pytest.mark.parametrize("_number", range(DRILLS))
def test_restore_drill_by_rebuild_without_a_snapshot(drill: Drill, _number: int) -> None:
    drill.train()
    drill.until_committed(5 * EVERY)
    before = drill.before()
    drill.lose_etcd()
    drill.command("rebuild", "--storage", str(drill.storage), "--yes")
    drill.goes_on(before, time.monotonic())


@pytest.mark.usefixtures("torch_installed")
@pytest.mark.parametrize("_number", range(DRILLS))
def test_restore_drill_under_agents_of_torchrun(
    start_cluster: StartCluster, nodes: Nodes, record: Record, tmp_path: Path, _number: int
) -> None:
    drill = Drill(start_cluster(coordinators=2), nodes, record, tmp_path, by_torchrun=True)
    drill.train()
    drill.until_committed(2 * EVERY)
    drill.command("backup", "--to", str(drill.backups))
    drill.until_committed(5 * EVERY)
    before = drill.before()
    drill.lose_etcd()
    drill.command("restore", "--from", str(drill.backups), "--storage", str(drill.storage), "--yes")
    drill.goes_on(before, time.monotonic())
    begun = [event for event in record.of("begun") if event["generation"] > before.generation]
    restarts = {int(event["restarts"]) for event in begun}
    assert restarts <= {0, 1}, "a worker fails once at most: if the other agent ends its worker first"
    assert len(record.of("controlplane.restored")) == 2, "each agent joined again once"
