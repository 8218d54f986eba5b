"""After the loss of all etcd data, the control plane is restored from a backup, in place, or from storage alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata
from strata import errors
from strata.checkpoint.catalog.protocol import SaveRequest
from strata.cli.etcd import access
from strata.client.api.coordinator import CoordinatorClient
from strata.client.checkpoints.catalog import CoordinatedCatalog
from strata.config import EtcdConfig
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.txn import Txn, TxnResult, read_prefix
from strata.devcluster.local_cluster import LocalCluster
from strata.etcd import EtcdStore
from strata.v1 import checkpoints_pb2 as pb
from tests.cluster_fixtures import StartCluster
from tests.polling import until
from tests.processes import LIMIT_S
from tests.storage.s3_stub import StubS3, serving
from tests.unit.cli.in_process import run_command

KEYS = ClusterKeys("default")
STATES = {
    pb.CHECKPOINT_STATE_COMMITTED: "committed",
    pb.CHECKPOINT_STATE_ABORTED: "aborted",
    pb.CHECKPOINT_STATE_OPEN: "open",
    pb.CHECKPOINT_STATE_DELETING: "deleting",
    pb.CHECKPOINT_STATE_CORRUPT: "corrupt",
}


@pytest.fixture
def cluster(start_cluster: StartCluster) -> LocalCluster:
    """Two coordinators over one etcd member that the test may wipe."""
    return start_cluster(coordinators=2)


def state_of(step: int) -> dict[str, Any]:
    chance = np.random.default_rng(step)
    return {"model": {"w": chance.standard_normal((64, 33)).astype(np.float32)}, "step": step}


class Lost:
    """A job that saves into one storage root, and operations that damage the job's etcd."""

    def __init__(self, cluster: LocalCluster, job: str, root: str, folder: Path) -> None:
        self.cluster = cluster
        self.job = job
        self.root = root
        self.snapshot = folder / "snapshot.db"
        self._member = cluster.etcd.members[0]

    # -- the job

    def connect(self, worker: str = "w") -> strata.RankClient:
        return strata.connect(
            self.cluster.endpoints, job=self.job, worker_id=worker, min_workers=1, timeout_s=LIMIT_S
        )

    @contextlib.contextmanager
    def trains(self, worker: str = "w", *, keep: int | None = None) -> Iterator[strata.CheckpointManager]:
        """Run the body as the only rank of a world. The rank ends as failed, so that the job is not done."""
        client = self.connect(worker)
        try:
            with strata.CheckpointManager(self.root, client=client, keep_count=keep) as manager:
                yield manager
        finally:
            client.close(code=1, reason="the test has seen enough")

    def saves(self, *steps: int, keep: int | None = None) -> None:
        """Save these steps in a world of one, and leave."""
        with self.trains(keep=keep) as manager:
            for step in steps:
                manager.save_state(state_of(step), step=step).wait(LIMIT_S)
            manager.wait_until_finished(LIMIT_S)

    def goes_on_from(self, step: int, *, then: int) -> None:
        """Make a new rank restore `step`, compare the state bit by bit, and save step `then`."""
        with self.trains("next") as manager:
            found = state_of(0)
            restored = manager.restore(found)
            assert restored is not None
            assert (restored.step, found["step"]) == (step, step)
            assert found["model"]["w"].tobytes() == state_of(step)["model"]["w"].tobytes()
            manager.save_state(state_of(then), step=then).wait(LIMIT_S)

    def catalog(self) -> dict[int, str]:
        with CoordinatorClient.connect(self.cluster.endpoints, job=self.job, timeout_s=LIMIT_S) as client:
            return {c.step: STATES[c.state] for c in client.checkpoints()}

    def latest(self) -> int:
        with CoordinatorClient.connect(self.cluster.endpoints, job=self.job, timeout_s=LIMIT_S) as client:
            return int(client.job_status().latest_step)

    def generation(self) -> int:
        with CoordinatorClient.connect(self.cluster.endpoints, job=self.job, timeout_s=LIMIT_S) as client:
            return int(client.job_status().world.generation)

    def saved_in(self) -> int:
        """Return the greatest generation that has saved a checkpoint."""
        with CoordinatorClient.connect(self.cluster.endpoints, job=self.job, timeout_s=LIMIT_S) as client:
            return max(c.generation for c in client.checkpoints())

    # -- its etcd

    def takes_a_snapshot(self) -> None:
        etcdctl = self.cluster.etcd.binary.tool("etcdctl")
        words = [str(etcdctl), "--endpoints", self._member.endpoint, "snapshot", "save", str(self.snapshot)]
        subprocess.run(words, check=True, capture_output=True)

    def loses_etcd(self) -> None:
        """Wipe the member's data and restart it on the same ports."""
        self._member.kill()
        shutil.rmtree(self._member.data)
        self._member.start()
        self.cluster.etcd.wait_healthy()
        self.noticed()

    def gets_the_snapshot_under_it(self) -> None:
        self._member.kill()
        self.cluster.etcd.put_snapshot(self.snapshot)
        self._member.start()
        self.cluster.etcd.wait_healthy()
        self.noticed()

    def noticed(self) -> None:
        """Return once no coordinator serves.

        Each request names a missing job, because a coordinator then reads etcd.
        """

        def suspended(address: str) -> bool:
            try:
                with CoordinatorClient.connect(address, job="nobody", timeout_s=1.0) as client:
                    client.job_status()
            except errors.StrataError as error:
                return "restored or replaced" in error.message
            return False

        until(lambda: all(suspended(each.address) for each in self.cluster.coordinators))

    def served(self, uid: str) -> None:
        """Return once every coordinator serves the cluster with this uid."""

        def serves(address: str) -> bool:
            try:
                with CoordinatorClient.connect(address, timeout_s=1.0) as client:
                    return bool(client.status().token.uid == uid)
            except errors.StrataError:
                return False

        until(lambda: all(serves(each.address) for each in self.cluster.coordinators))

    def held(self) -> dict[str, bytes]:
        async def read() -> dict[str, bytes]:
            async with await EtcdStore.connect(self.cluster.etcd.endpoints) as store:
                return {kv.key: kv.value for kv in (await store.read(read_prefix(KEYS.root))).kvs}

        return asyncio.run(read())

    # -- the command

    def run(self, command: str, *words: object, code: int = 0) -> str:
        etcd = ("--etcd", ",".join(self.cluster.etcd.endpoints))
        return run_command("controlplane", command, *words, *etcd, code=code)

    def values(self, command: str, *words: object) -> Any:
        """Run the command with --yes --json.

        Once all coordinators serve, return this job's entry and the whole document.
        """
        document = json.loads(self.run(command, *words, "--yes", "--json"))
        self.served(document["uid"])
        (mine,) = [job for job in document["jobs"] if job["name"] == self.job]
        return mine, document


@pytest.fixture
def lost(cluster: LocalCluster, job: str, tmp_path: Path) -> Lost:
    return Lost(cluster, job, str(tmp_path / "root"), tmp_path)


def test_a_wiped_etcd_is_restored_from_a_snapshot_and_later_commits_in_storage(lost: Lost) -> None:
    lost.saves(10, 20)
    lost.takes_a_snapshot()
    lost.saves(30, 40)
    before = lost.saved_in()
    uid = json.loads(lost.held()[KEYS.uid])["uid"]
    lost.loses_etcd()
    shown = lost.run("restore", "--from", lost.snapshot, "--storage", lost.root, "--dry-run")
    assert "steps 30, 40: committed in storage, and adopted" in shown
    assert "coordinators run" not in shown
    assert KEYS.restoring not in lost.held()
    mine, document = lost.values("restore", "--from", lost.snapshot, "--storage", lost.root)
    assert [slot["step"] for slot in mine["adopted"]] == [30, 40]
    assert (mine["latest_before"], mine["latest"]) == (20, 40)
    assert document["uid"].startswith(f"{uid}.")
    assert lost.catalog() == {10: "committed", 20: "committed", 30: "committed", 40: "committed"}
    assert lost.latest() == 40
    assert lost.generation() > before
    lost.goes_on_from(40, then=50)
    assert lost.latest() == 50


def test_a_cluster_rolled_back_to_an_older_snapshot_is_completed_in_place(lost: Lost) -> None:
    lost.saves(10, 20)
    lost.takes_a_snapshot()
    lost.saves(30)
    lost.gets_the_snapshot_under_it()
    mine, _printed = lost.values("restore", "--in-place", "--storage", lost.root)
    assert [slot["step"] for slot in mine["adopted"]] == [30]
    assert lost.catalog() == {10: "committed", 20: "committed", 30: "committed"}
    lost.goes_on_from(30, then=40)


def test_without_a_backup_the_control_plane_is_rebuilt_from_storage(lost: Lost) -> None:
    lost.saves(10, 20)
    lost.saves(30)
    before = lost.saved_in()
    lost.loses_etcd()
    mine, document = lost.values("rebuild", "--storage", lost.root)
    assert [slot["step"] for slot in mine["adopted"]] == [10, 20, 30]
    assert not mine["in_base"]
    assert lost.catalog() == {10: "committed", 20: "committed", 30: "committed"}
    assert lost.generation() > before
    assert lost.latest() == 30
    lost.goes_on_from(30, then=40)
    assert document["skipped"] == []


def test_a_checkpoint_removed_after_the_backup_is_not_restored(lost: Lost) -> None:
    lost.saves(10, 20)
    lost.takes_a_snapshot()
    lost.saves(30, 40, keep=1)
    until(lambda: lost.catalog() == {40: "committed"})
    lost.loses_etcd()
    mine, _printed = lost.values("restore", "--from", lost.snapshot, "--storage", lost.root)
    assert [slot["step"] for slot in mine["lost"]] == [20, 10]
    assert lost.catalog() == {40: "committed"}
    lost.goes_on_from(40, then=50)


def test_an_open_save_is_adopted_if_marked_and_aborted_otherwise(lost: Lost) -> None:
    client = lost.connect()
    with strata.CheckpointManager(lost.root, client=client) as manager:
        manager.save_state(state_of(10), step=10).wait(LIMIT_S)
        catalog = CoordinatedCatalog(
            client, root_uri=Path(lost.root).as_uri(), new_id=lambda: uuid.uuid4().hex, save_wait_s=LIMIT_S
        )
        with contextlib.closing(catalog):
            for step in (20, 30):
                catalog.begin(SaveRequest(step=step))
        lost.takes_a_snapshot()
        manager.save_state(state_of(20), step=20).wait(LIMIT_S)
    client.close(code=1)
    lost.loses_etcd()
    mine, _printed = lost.values("restore", "--from", lost.snapshot, "--storage", lost.root)
    assert [slot["step"] for slot in mine["adopted"]] == [20]
    assert [slot["step"] for slot in mine["aborted"]] == [30]
    assert lost.catalog() == {10: "committed", 20: "committed", 30: "aborted"}
    lost.goes_on_from(20, then=40)


class Interrupted(EtcdStore):
    """A store that raises KeyboardInterrupt at the n-th transaction, before or after its effect."""

    at = 0
    after = False
    count = 0

    async def execute(self, txn: Txn) -> TxnResult:
        Interrupted.count += 1
        if Interrupted.count == Interrupted.at and not Interrupted.after:
            raise KeyboardInterrupt
        result = await super().execute(txn)
        if Interrupted.count == Interrupted.at:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_restore_interrupted_at_any_transaction_can_be_run_again(
    lost: Lost, at: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost.saves(10)
    lost.takes_a_snapshot()
    lost.saves(20)
    lost.loses_etcd()

    async def open_store(config: EtcdConfig, *, timeout_s: float) -> EtcdStore:
        del timeout_s
        return await Interrupted.connect(config.endpoints)

    Interrupted.at, Interrupted.after, Interrupted.count = at, after, 0
    words = ("restore", "--from", lost.snapshot, "--storage", lost.root, "--yes")
    with monkeypatch.context() as patch:
        patch.setattr(access, "open_store", open_store)
        output = lost.run(*words, code=130)
    assert "run the same command again" in output
    keys = lost.held()
    done = at == 3 and after
    assert (KEYS.uid in keys) is done
    again = lost.run(*words, *(["--replace"] if done else []))
    assert ("taken over" in again) is (not done and (at, after) != (1, False))
    assert lost.catalog() == {10: "committed", 20: "committed"}
    lost.goes_on_from(20, then=30)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubS3]:
    with serving(StubS3()) as server:
        for name in ("AWS_PROFILE", "HTTP_PROXY", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield server


def test_roots_in_s3_are_searched(cluster: LocalCluster, job: str, s3: StubS3, tmp_path: Path) -> None:
    lost = Lost(cluster, job, "s3://bucket/runs", tmp_path)
    lost.saves(10)
    lost.takes_a_snapshot()
    lost.saves(20)
    lost.loses_etcd()
    mine, _printed = lost.values("restore", "--from", lost.snapshot, "--storage", lost.root, "--verify")
    assert [slot["step"] for slot in mine["adopted"]] == [20]
    lost.goes_on_from(20, then=30)
    assert s3.uploads == {}


def test_a_backup_is_restored_from_its_place(lost: Lost, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    lost.saves(10)
    lost.run("backup", "--to", backups)
    lost.saves(20)
    lost.loses_etcd()
    output = lost.run("restore", "--from", backups, "--cluster", "other", "--yes", code=4)
    assert "holds no finished backup of cluster other" in output
    (database,) = backups.glob("*.db")
    whole = database.read_bytes()
    database.write_bytes(whole[:-1] + b"x")
    assert "has changed since the backup" in lost.run("restore", "--from", backups, "--yes", code=1)
    database.write_bytes(whole)
    mine, document = lost.values("restore", "--from", backups, "--storage", lost.root)
    assert document["source"].startswith("the backup of ")
    assert [slot["step"] for slot in mine["adopted"]] == [20]
    assert KEYS.backup in lost.held(), "its age is known on"
    lost.goes_on_from(20, then=30)


def test_jobs_that_are_there_are_not_overwritten_by_accident(lost: Lost) -> None:
    lost.saves(10)
    lost.takes_a_snapshot()
    output = lost.run("restore", "--from", lost.snapshot, "--storage", lost.root, "--yes", code=4)
    assert "--replace" in output
    assert "restore --in-place" in lost.run("rebuild", "--storage", lost.root, "--yes", code=4)
    assert "pass either --from PLACE or --in-place" in lost.run("restore", "--yes", code=2)
