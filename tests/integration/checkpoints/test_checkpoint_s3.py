"""A `CheckpointManager` over S3, and over a disk with S3 behind it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.client.checkpoints.manager import CheckpointManager
from strata.errors import ConfigError, StorageError
from tests.integration.checkpoints.test_checkpoint_processes import NO_MORE_THREADS, run
from tests.storage.s3_stub import StubS3, serving
from tests.unit.checkpoint.ports import Cluster

LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def _nobodys_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "STRATA_SOCKET",
        "WORLD_SIZE",
        "AWS_PROFILE",
        "AWS_ENDPOINT_URL",
        "HTTP_PROXY",
        "http_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


@pytest.fixture
def stub() -> Iterator[StubS3]:
    with serving(StubS3()) as server:
        yield server


def state(value: float) -> dict[str, Any]:
    return {"weights": np.full(2_500_000, value, dtype=np.float32), "step": int(value)}


def in_s3(stub: StubS3, **settings: Any) -> CheckpointManager:
    return CheckpointManager("s3://bucket/runs/gpt", endpoint_url=stub.url, region="us-east-1", **settings)


def behind(near: Path, stub: StubS3, **settings: Any) -> CheckpointManager:
    return CheckpointManager(
        near, replica_path="s3://bucket/runs/gpt", endpoint_url=stub.url, region="us-east-1", **settings
    )


def folders(stub: StubS3) -> list[str]:
    return sorted({key.split("/")[2] for key in stub.objects if "/step-" in key})


@pytest.mark.journey
def test_a_training_saves_to_s3_and_resumes_from_it(stub: StubS3) -> None:
    with in_s3(stub, keep_count=2) as manager:
        assert manager.restore(state(0)) is None
        for step in (1, 2):
            manager.save_state(state(step), step)
        info = manager.save_state(state(3), 3).wait(LIMIT_S)
        assert info.path.startswith("s3://bucket/runs/gpt/step-000000000003-")
        manager.wait_until_finished(LIMIT_S)
        assert manager.all_steps()[-2:] == [2, 3]
    assert len(folders(stub)) == 2
    with in_s3(stub) as manager:
        found = state(0)
        restored = manager.restore(found)
        assert restored is not None
        assert (restored.step, found["step"]) == (3, 3)
        assert np.array_equal(found["weights"], state(3)["weights"])
    assert stub.uploads == {}


@pytest.mark.parametrize("settings", ["{}", "{'low_memory': True}"])
@pytest.mark.parametrize("early", [True, False])
def test_a_large_save_at_the_end_of_the_process_needs_no_new_thread(
    stub: StubS3, settings: str, early: bool
) -> None:
    program = NO_MORE_THREADS.replace("EVERY_SAVE", "ckpt.save(bytes(32 << 20), 2)")
    program = program.replace("SETTINGS", f"{settings}, endpoint_url={stub.url!r}, region='us-east-1'")
    if early:
        program += "ckpt.save(bytes(32 << 20), 1)\n"
    assert run(program, "s3://bucket/runs/gpt") == (0, "")
    with in_s3(stub) as manager:
        assert manager.all_steps() == ([1, 2] if early else [2])
        assert manager.load_bytes(2) == bytes(32 << 20)
    assert stub.uploads == {}


def test_a_save_refused_by_s3_raises_and_keeps_the_previous_checkpoint(stub: StubS3) -> None:
    manager = in_s3(stub)
    manager.save_state(state(1), 1).wait(LIMIT_S)
    stub.fail("part", status=403, times=99)
    info = manager.save_state(state(2), 2)
    with pytest.raises(StorageError, match="403") as error:
        info.wait(LIMIT_S)
    assert "read, write, list and delete" in error.value.hint
    assert manager.latest_step() == 1
    manager.close()


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (404, "NoSuchBucket")])
def test_an_s3_read_error_fails_the_restore_and_no_older_step_is_restored(
    stub: StubS3, status: int, code: str
) -> None:
    with in_s3(stub) as manager:
        for step in (1, 2):
            manager.save_state(state(step), step).wait(LIMIT_S)
    with in_s3(stub) as manager:
        fault = stub.fail("get", status=status, code=code, times=999, key="rank-00000.safetensors")
        found = state(0)
        with pytest.raises(StorageError, match=code):
            manager.restore(found)
        assert (found["step"], found["weights"].max()) == (0, 0)
        fault.times = 0
        restored = manager.restore(found)
        assert restored is not None
        assert (restored.step, found["step"]) == (2, 2)


def test_a_wrong_bucket_is_refused_before_training_starts(stub: StubS3) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket"):
        CheckpointManager("s3://buckte/x", endpoint_url=stub.url, region="us-east-1")


def test_a_root_belongs_to_one_mode_in_s3_too(stub: StubS3) -> None:
    with in_s3(stub) as manager:
        manager.save(b"1", 1)
    name = next(key for key in stub.objects if key.endswith("strata.json"))
    stub.objects[name].data = stub.objects[name].data.replace(b"standalone", b"coordinated")
    with pytest.raises(ConfigError, match="coordinated"):
        in_s3(stub)


def test_ranks_under_coordinators_share_a_bucket(stub: StubS3) -> None:
    cluster = Cluster(a=1, b=1)

    def both(**settings: Any) -> list[CheckpointManager]:
        point = cluster.restore_point()
        return [in_s3(stub, client=cluster.port(rank, restore=point), **settings) for rank in (0, 1)]

    managers = both()
    for step in (1, 2):
        infos = [m.save_state({"rank": rank, **state(step)}, step) for rank, m in enumerate(managers)]
        for info in infos:
            info.wait(LIMIT_S)
    for manager in managers:
        manager.close()
    assert [record.path.split("/")[:6] for record in cluster.records()] == [
        ["s3:", "", "bucket", "runs", "gpt", "job"]
    ] * 2
    assert sorted(key.rpartition("/")[2] for key in stub.objects if "/step-000000000002-" in key) == [
        "COMMIT",
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
        "rank-00001.json",
        "rank-00001.safetensors",
    ]
    for rank, manager in enumerate(both()):
        found = {"rank": -1, **state(0)}
        assert manager.restore(found) is not None
        assert (found["rank"], found["step"]) == (rank, 2)
        manager.close()


# -- a second storage -------------------------------------------------------------------------


@pytest.mark.journey
def test_a_checkpoint_outlives_the_disk(stub: StubS3, tmp_path: Path) -> None:
    with behind(tmp_path / "near", stub, keep_count=1) as manager:
        manager.save_state(state(1), 1)
        info = manager.save_state(state(2), 2)
        manager.wait_until_replicated(LIMIT_S)
        assert info.replicated
        assert info.path.startswith("file://")
    shutil.rmtree(tmp_path / "near")
    with behind(tmp_path / "near", stub) as manager:
        found = state(0)
        restored = manager.restore(found)
        assert restored is not None
        assert restored.step == 2
        assert np.array_equal(found["weights"], state(2)["weights"])
        manager.save_state(state(3), 3).wait(LIMIT_S)
        assert manager.all_steps()[-2:] == [2, 3]


def test_training_continues_while_the_second_storage_is_unavailable(
    stub: StubS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = behind(tmp_path / "near", stub, keep_count=1, commit_timeout_s=0.5)
    manager.save_state(state(1), 1).wait(LIMIT_S)
    manager.wait_until_replicated(LIMIT_S)
    for kind in ("put", "create", "head", "get", "list", "part"):
        stub.fail(kind, status=403, times=10_000)
    for step in (2, 3):
        assert manager.save_state(state(step), step).wait(LIMIT_S).committed
    manager.wait_until_finished(LIMIT_S)
    with pytest.raises(StorageError, match=r"steps \[2, 3\] are not in s3://bucket/runs/gpt yet"):
        manager.close()
    assert "the copy to s3://bucket/runs/gpt waits" in caplog.text


def test_a_damaged_local_checkpoint_is_restored_from_s3(
    stub: StubS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with behind(tmp_path / "near", stub) as manager:
        manager.save_state(state(7), 7)
    image = next((tmp_path / "near").glob("step-*/*.safetensors"))
    data = bytearray(image.read_bytes())
    data[9_000_000 % len(data)] ^= 1
    image.write_bytes(data)
    with behind(tmp_path / "near", stub) as manager, caplog.at_level(logging.WARNING):
        found = state(0)
        assert manager.restore(found) is not None
        assert np.array_equal(found["weights"], state(7)["weights"])
    assert "step 7 is taken from s3://bucket/runs/gpt" in caplog.text


def test_without_a_second_storage_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(ConfigError, match="no second storage"):
        manager.wait_until_replicated(1)
