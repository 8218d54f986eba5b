"""Damage that a rank finds: it reads again and reports it, another host verifies, and waiting ranks get the verdict."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.restore import reader
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.client.checkpoints.maintenance import Maintenance
from strata.core.kv.records import CheckpointState
from strata.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    StaleGeneration,
    StorageError,
)
from strata.v1 import checkpoints_pb2 as pb
from tests.unit.checkpoint.ports import Cluster, state_of
from tests.unit.client.coordinated import LIMIT_S, damage, manager, managers, save


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(a=1)


def test_a_rank_that_cannot_restore_reports_damage_and_ends_with_its_generation(
    cluster: Cluster, tmp_path: Path
) -> None:
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10, 20)
    damage(tmp_path, 20)
    reports: list[pb.ReportDamageRequest] = []

    def over(request: object) -> None:
        if isinstance(request, pb.ReportDamageRequest):
            reports.append(request)
        elif isinstance(request, pb.GetCheckpointRequest) and reports:
            raise StaleGeneration("generation 1 has ended")

    cluster.on_call = over
    with (
        manager(cluster, tmp_path, restores=True) as ckpt,
        pytest.raises(StaleGeneration),
    ):
        ckpt.restore({"w": np.zeros(4)})
    assert [(r.step, r.generation) for r in reports] == [(20, 1)]
    assert "rank-00000.safetensors" in reports[0].reason


def test_an_intact_second_read_is_restored_without_a_damage_report(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10)
    tries: list[int] = []
    read = reader.load

    def load(*args: Any, **more: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise CheckpointCorrupt("a bit")
        return read(*args, **more)

    monkeypatch.setattr("strata.client.checkpoints.tiers.load", load)
    with manager(cluster, tmp_path, restores=True) as ckpt:
        assert ckpt.restore({"w": np.zeros(4)}) is not None
    assert len(tries) == 2
    assert pb.ReportDamageRequest not in cluster.answers


def saved_by_two_hosts(tmp_path: Path) -> Cluster:
    """Save step 10 with one rank on each of two hosts; return the control plane."""
    cluster = Cluster(a=1, b=1)
    with managers(cluster, tmp_path) as ranks:
        for info in [m.save_state({"w": np.full(4, 7.0)}, 10) for m in ranks]:
            info.wait(LIMIT_S)
    return cluster


def test_a_rank_whose_report_is_refuted_fails_at_once(tmp_path: Path) -> None:
    """The other host read the saved bytes intact, so this host's memory or disk controller is faulty."""
    cluster = saved_by_two_hosts(tmp_path)
    damage(tmp_path, 10)
    (record,) = cluster.records()
    report = pb.ReportDamageRequest(step=10, attempt=record.attempt, host="host-b", sound=True)

    def refutes(request: object) -> None:
        if isinstance(request, pb.GetCheckpointRequest):
            cluster.on_call = lambda _: None
            cluster.call(report)

    for printed in ("host-b on primary: found no damage where", "host-b read step-"):
        cluster.on_call = refutes
        began = time.monotonic()
        with (
            manager(cluster, tmp_path, restores=True, corrupt_wait_s=LIMIT_S) as ckpt,
            pytest.raises(CheckpointCorrupt, match=printed),
        ):
            ckpt.restore({"w": np.zeros(4)})
        assert time.monotonic() - began < LIMIT_S
    assert state_of(cluster, 10) is CheckpointState.COMMITTED


def test_a_missing_file_is_named_but_is_not_damage(cluster: Cluster, tmp_path: Path) -> None:
    """The file may come back with a mount: the rank asks no other host, and restores no older step."""
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10, 20)
    (image,) = tmp_path.glob("job/step-000000000020-*/*.safetensors")
    image.unlink()
    with (
        manager(cluster, tmp_path, restores=True) as ckpt,
        pytest.raises(CheckpointIncomplete, match="is missing"),
    ):
        ckpt.restore({"w": np.zeros(4)})
    assert pb.ReportDamageRequest not in cluster.answers


@pytest.mark.parametrize("lost", ["the folder", "a file"])
def test_a_failed_restore_names_intact_checkpoints_missing_from_the_catalog(
    cluster: Cluster, tmp_path: Path, lost: str
) -> None:
    """etcd was restored from a backup.

    Storage lacks the backup's newest checkpoint, and the backup lacks later ones.
    """
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10)
        older = cluster.copy()
        save(ckpt, 20, 30, 40)
    (folder,) = tmp_path.glob("job/step-000000000010-*")
    if lost == "the folder":
        shutil.rmtree(folder)
    else:
        next(iter(folder.glob("*.safetensors"))).unlink()
    damage(tmp_path, 30)  # by one bit: completeness is judged by the files and their sizes
    next(iter(tmp_path.glob("job/step-000000000020-*/*.safetensors"))).unlink()
    with (
        manager(older, tmp_path, restores=True) as ckpt,
        pytest.raises(CheckpointError, match=r"catalog does not have them: steps 30, 40 ") as caught,
    ):
        ckpt.restore({"w": np.zeros(4)})
    assert f"strata controlplane restore --in-place --storage file://{tmp_path}" in caught.value.hint


class Watched(LocalStorage):
    """Record the files that were opened for reading."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, nonce=lambda: "n")
        self.opened: list[str] = []

    def source(self, name: str) -> Any:
        self.opened.append(name.rpartition("/")[2])
        return super().source(name)


def test_a_host_that_confirms_reads_the_reported_image_alone_and_once(tmp_path: Path) -> None:
    cluster = Cluster(a=2, b=1)
    with managers(cluster, tmp_path) as ranks:
        for info in [m.save_state({"w": np.full(4, 7.0)}, 10) for m in ranks]:
            info.wait(LIMIT_S)
    record = cluster.records()[0]
    folder = record.path.rpartition("/")[2]
    image = tmp_path / "job" / folder / "rank-00001.safetensors"
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    cluster.pushes = False
    report = pb.ReportDamageRequest(
        step=10,
        attempt=record.attempt,
        host="host-a",
        reason="a bit",
        object=f"{folder}/rank-00001.safetensors",
    )
    cluster.call(report)
    storage = Watched(tmp_path)
    Maintenance(cluster.port(2).call, job="job", host="host-b", storages=[storage]).look()
    assert storage.opened == ["rank-00001.safetensors"]
    assert state_of(cluster, 10) is CheckpointState.CORRUPT


def test_a_host_that_has_nothing_of_a_checkpoint_confirms_no_damage(tmp_path: Path) -> None:
    """A file missing here proves nothing: it may be on the other host's disk, or on an unmounted file system."""
    cluster = saved_by_two_hosts(tmp_path)
    (tmp_path / "job").rename(tmp_path / "elsewhere")
    (record,) = cluster.records()
    cluster.call(pb.ReportDamageRequest(step=10, attempt=record.attempt, host="host-a", reason="a bit"))
    tasks = Maintenance(
        cluster.port(1).call,
        job="job",
        host="host-b",
        storages=[LocalStorage(tmp_path, nonce=lambda: "n")],
    )
    tasks.look()
    assert state_of(cluster, 10) is CheckpointState.COMMITTED
    answer = cluster.call(pb.GetCheckpointRequest(step=10, attempt=record.attempt))
    assert [
        report
        for report in answer.checkpoint.corruption_reports
        if report.startswith("host-b on primary: could not read")
    ]


class Away(LocalStorage):
    """A storage that cannot be read."""

    def source(self, name: str) -> Any:
        raise StorageError(f"{name}: Input/output error")


def test_a_waiting_rank_learns_that_the_other_host_cannot_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = saved_by_two_hosts(tmp_path)
    damage(tmp_path, 10)
    away = Maintenance(
        cluster.port(1).call, job="job", host="host-b", storages=[Away(tmp_path, nonce=lambda: "n")]
    )
    answered: list[pb.GetCheckpointRequest] = []
    unread: list[pb.ReportDamageRequest] = []

    def look(request: object) -> None:
        if isinstance(request, pb.ReportDamageRequest) and request.host == "host-b":
            unread.append(request)
        if isinstance(request, pb.GetCheckpointRequest) and not answered:
            answered.append(request)
            away.look()

    cluster.on_call = look
    with (
        manager(cluster, tmp_path, restores=True, corrupt_wait_s=1.0) as ckpt,
        pytest.raises(CheckpointCorrupt) as raised,
    ):
        ckpt.restore({"w": np.zeros(4)})
    assert answered
    assert [(r.unread, r.sound) for r in unread] == [(True, False)]
    for text in (raised.value.message, caplog.text):
        assert "; host-b on primary: could not read it: " in text or "step 10: host-b on primary: " in text
        assert "Input/output error" in text
    assert state_of(cluster, 10) is CheckpointState.COMMITTED


def saved_twice(cluster: Cluster, tmp_path: Path) -> tuple[Path, Path]:
    """Save step 10 to the near and the far storage; return both paths."""
    near, far = tmp_path / "near", tmp_path / "far"
    with manager(cluster, near, replica_path=far) as ckpt:
        save(ckpt, 10)
        ckpt.wait_until_replicated(LIMIT_S)
    return near, far


def reports_to(cluster: Cluster) -> list[pb.ReportDamageRequest]:
    """Return a list that collects every damage report from now on."""
    reports: list[pb.ReportDamageRequest] = []
    cluster.on_call = lambda r: reports.append(r) if isinstance(r, pb.ReportDamageRequest) else None
    return reports


def test_damage_of_the_near_copy_is_not_reported_for_the_far_one(cluster: Cluster, tmp_path: Path) -> None:
    near, far = saved_twice(cluster, tmp_path)
    damage(near, 10)
    reports = reports_to(cluster)
    with manager(cluster, near, restores=True, replica_path=far) as ckpt:
        assert ckpt.restore({"w": np.zeros(4)}) is not None
    assert [(r.tier, r.generation) for r in reports] == [("primary", 0)]
    assert reports[0].object.endswith("/rank-00000.safetensors")
    assert state_of(cluster, 10) is CheckpointState.COMMITTED
    damage(far, 10)
    reports.clear()
    with (
        manager(cluster, near, restores=True, replica_path=far, corrupt_wait_s=0.1) as ckpt,
        pytest.raises(CheckpointCorrupt),
    ):
        ckpt.restore({"w": np.zeros(4)})
    assert [(r.tier, r.generation) for r in reports] == [("primary", 1), ("replica", 1)]


def test_a_host_without_the_near_copy_reports_nothing_about_it(cluster: Cluster, tmp_path: Path) -> None:
    near, far = saved_twice(cluster, tmp_path)
    near.rename(tmp_path / "on the host that saved")  # each host has its own disk at this path
    damage(far, 10)
    reports = reports_to(cluster)
    with (
        manager(cluster, near, restores=True, replica_path=far, corrupt_wait_s=0.1) as ckpt,
        pytest.raises(CheckpointCorrupt),
    ):
        ckpt.restore({"w": np.zeros(4)})
    assert [(r.tier, r.generation) for r in reports] == [("replica", 1)]


def test_a_request_during_a_maintenance_pass_starts_another_pass(cluster: Cluster, tmp_path: Path) -> None:
    looks: list[str] = []
    going, go_on = threading.Event(), threading.Event()

    def look(request: object) -> None:
        if isinstance(request, pb.ListMaintenanceRequest):
            looks.append(request.host)
            if len(looks) == 1:
                going.set()
                assert go_on.wait(LIMIT_S)

    cluster.on_call = look
    tasks = Maintenance(cluster.port(0).call, job="job", host="h", storages=[])
    tasks.soon()
    assert going.wait(LIMIT_S)
    tasks.soon()
    tasks.soon()
    go_on.set()
    tasks.close(LIMIT_S)
    assert looks == ["h"] * 4, "two passes: to look, and to tidy"


def test_damage_found_by_step_is_reported_and_ends_no_generation(cluster: Cluster, tmp_path: Path) -> None:
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10, 20)
        damage(tmp_path, 10)
        with pytest.raises(CheckpointCorrupt):
            ckpt.restore({"w": np.zeros(4)}, step=10)
        record = cluster.records()[0]
        keys = cluster.view().keys
        (name,) = cluster.view().view.names(keys.suspects(10, record.generation, record.attempt, "primary"))
    assert name
    assert state_of(cluster, 10) is CheckpointState.COMMITTED, "host-a, where the member is, must look"


def test_a_maintenance_task_is_skipped_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    requests: list[object] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    tasks = Maintenance(requests.append, job="job", host="h", storages=[])
    tasks.soon()
    tasks.close(1.0)
    assert requests == []
