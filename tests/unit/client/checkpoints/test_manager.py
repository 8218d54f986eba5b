"""`CheckpointManager` without coordinators, and the methods of any manager that a training loop calls at each step."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.removal import remove_objects
from strata.checkpoint.storage.sink import NotAnObject
from strata.client.checkpoints.manager import CheckpointManager, CheckpointManagerConfig
from strata.core.checkpoints.lifecycle import decide_pin
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    InvalidArgument,
    Refused,
    StorageError,
)
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.ports import Cluster
from tests.unit.client import coordinated

LIMIT_S = 20


def images(root: Path) -> list[Path]:
    return sorted(root.glob("step-*/*.safetensors"))


# -- the documented calls ---------------------------------------------------------------------


def test_bytes_are_saved_positionally_and_by_keyword(manager: CheckpointManager) -> None:
    model_bytes = b"weights" * 1000
    info = manager.save(model_bytes, step=5000, epoch=10)
    assert info.staged
    assert info.step == 5000
    assert info.path.startswith("file:///")
    assert info.wait(LIMIT_S).committed
    manager.save(b"more", 6000, 11, CheckpointType.FULL).wait(LIMIT_S)
    manager.save(model_bytes=bytearray(b"most"), step=7000, epoch=12, checkpoint_type=CheckpointType.FULL)
    manager.wait_until_finished(LIMIT_S)
    manager.check_for_errors()
    assert (manager.latest_step(), manager.all_steps()) == (7000, [5000, 6000, 7000])
    assert manager.load_bytes(5000) == model_bytes
    assert manager.load_bytes() == b"most"
    assert [c.epoch for c in manager.all_checkpoints()] == [10, 11, 12]


def test_a_state_is_saved_and_restored(manager: CheckpointManager) -> None:
    state: dict[str, Any] = {"w": np.arange(4.0), "progress": {"step": 7}}
    manager.save_state(state, step=7, metadata={"note": "n"})
    state["w"][:], state["progress"]["step"] = 0, 0
    found = manager.restore(state)
    assert found is not None
    assert (found.step, found.metadata, found.state) == (7, {"note": "n"}, CheckpointState.COMMITTED)
    assert state["w"].tolist() == [0, 1, 2, 3]
    assert state["progress"] == {"step": 7}


def test_an_empty_root_has_nothing_to_restore(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": np.ones(1)}
    with caplog.at_level(logging.INFO):
        assert manager.restore(state) is None
    assert "nothing to restore" in caplog.text
    assert (manager.latest_step(), manager.all_steps()) == (None, [])
    with pytest.raises(CheckpointNotFound):
        manager.load_bytes()
    with pytest.raises(CheckpointNotFound, match="step 3"):
        manager.restore(state, step=3)


def test_random_generators_are_part_of_a_state(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save_state({}, 1)
        expected = random.random(), np.random.rand()
        random.seed(0)
        manager.restore({})
        assert (random.random(), np.random.rand()) == expected
    with CheckpointManager(tmp_path, capture_rng=False) as manager:
        random.seed(5)
        after = random.Random(5).random()
        manager.restore({})
        assert random.random() == after


def test_a_save_after_restoring_an_explicit_step_becomes_the_latest(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (20, 40):
            manager.save_state({"a": step}, step)
        state: dict[str, Any] = {"a": None}
        found = manager.restore(state, step=20)
        assert found is not None
        assert state == {"a": 20}
        manager.save_state({"a": 30}, 30)
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 30
        manager.restore(state)
        assert state == {"a": 30}
        assert manager.all_steps() == [20, 30, 40]


# -- corrupt data is never loaded -------------------------------------------------------------


@pytest.mark.parametrize("name", [MARKER, "manifest.json", "rank-00000.json", "rank-00000.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_corruption(tmp_path: Path, name: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (20, 40):
            manager.save_state({"a": step}, step)
    (file,) = tmp_path.glob(f"step-*40-gen-*/{name}")
    file.unlink()
    file.mkdir()
    state: dict[str, Any] = {"a": None}
    with CheckpointManager(tmp_path) as manager:
        found = manager.restore(state)
        assert found is not None
        assert (found.step, state) == (20, {"a": 20})
        with pytest.raises(CheckpointCorrupt, match=name.replace(".", r"\.")):
            manager.restore(state, step=40)


# -- retention --------------------------------------------------------------------------------


def test_a_corrupt_checkpoint_is_kept_until_enough_newer_ones_exist(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_count=2) as manager:
        manager.save(b"1", 1).wait(LIMIT_S)
        images(tmp_path)[0].unlink()
        manager.save(b"2", 2)
        manager.wait_until_finished(LIMIT_S)
        assert [c.state for c in manager.all_checkpoints()] == [
            CheckpointState.CORRUPT,
            CheckpointState.COMMITTED,
        ]
        manager.save(b"3", 3)
        manager.save(b"4", 4)
        manager.wait_until_finished(LIMIT_S)
        assert [c.step for c in manager.all_checkpoints()] == [3, 4]


# -- refusals ---------------------------------------------------------------------------------


def test_settings_may_come_as_a_config_and_be_overridden(tmp_path: Path) -> None:
    config = CheckpointManagerConfig(storage_path="/nowhere", keep_count=3)
    with CheckpointManager(tmp_path, config=config, save_wait_s=5) as manager:
        assert manager.config == CheckpointManagerConfig(storage_path=tmp_path, keep_count=3, save_wait_s=5)


def test_arguments_of_the_wrong_kind_are_refused(manager: CheckpointManager) -> None:
    with pytest.raises(InvalidArgument, match="epoch"):
        manager.save(b"", 1, epoch="x")  # type: ignore[arg-type]  # wrong on purpose
    for step in (-1, 1.5, True, "7", 10**12):
        with pytest.raises(InvalidArgument, match="step"):
            manager.save(b"", step)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="save_state"):
        manager.save({"a": 1}, 1)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="mapping"):
        manager.save_state([1], 1)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="metadata"):
        manager.save(b"", 1, metadata={"a": 1})  # type: ignore[dict-item]  # wrong on purpose


def test_bytes_and_states_are_not_taken_for_each_other(manager: CheckpointManager) -> None:
    manager.save(b"x", 1)
    with pytest.raises(CheckpointError, match="saved as bytes"):
        manager.restore({"a": 1})
    manager.save_state({"a": 1}, 2)
    with pytest.raises(CheckpointError, match="restore"):
        manager.load_bytes(2)


def test_several_processes_need_coordinators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes train together"):
        CheckpointManager(tmp_path)


def test_a_root_of_coordinators_is_refused(tmp_path: Path) -> None:
    (tmp_path / "strata.json").write_text('{"format":"strata-root","version":1,"owner":"coordinated"}')
    with pytest.raises(ConfigError, match="names coordinated"):
        CheckpointManager(tmp_path)


def test_a_restore_writes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root") as manager:
        manager.restore({})
    assert not (tmp_path / "root").exists()


# -- the end ----------------------------------------------------------------------------------


def fails(info: object) -> None:
    raise StorageError("disk full")


def test_leaving_the_context_raises_the_error_of_a_failed_save(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="disk full"), CheckpointManager(tmp_path) as manager:
        manager.save(b"x", 1, progress=fails)


@pytest.mark.parametrize("asks", ["a save", "check_for_errors", "wait_until_finished", "close"])
def test_a_save_after_settle_is_made_before_it_raises_the_earlier_error(tmp_path: Path, asks: str) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(b"x", 1, progress=fails)
    manager.settle(LIMIT_S)
    assert manager.save(b"x", 2).wait(LIMIT_S).committed
    with pytest.raises(StorageError, match="disk full"):
        manager.save(b"x", 3) if asks == "a save" else getattr(manager, asks)()
    manager.close()
    assert manager.all_steps() == [2]


def train_and_fail(root: Path) -> None:
    with CheckpointManager(root) as manager:
        manager.save(b"x", 1, progress=fails)
        raise ZeroDivisionError


def test_the_context_does_not_mask_the_trainings_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        train_and_fail(tmp_path)
    assert "disk full" in caught.value.__notes__[0]


def test_closing_twice_is_harmless_and_then_nothing_is_saved(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.close()
    manager.close()
    with pytest.raises(ConfigError, match="closed"):
        manager.save(b"x", 1)


# -- a training loop's questions about one step: whether to save it, to delete it, and which step is best


LIMIT_S = 20


def save(manager: CheckpointManager, *steps: int, **more: Any) -> None:
    for step in steps:
        manager.save_state({"w": np.full(1000, float(step)), "stays": np.ones(200_000)}, step, **more).wait(
            LIMIT_S
        )
    manager.wait_until_finished(LIMIT_S)


def folders(root: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in root.glob("**/step-*"))


# -- delete -----------------------------------------------------------------------------------


def test_a_deleted_step_is_removed_with_its_bytes(manager: CheckpointManager, tmp_path: Path) -> None:
    save(manager, 1, 2, 3)
    manager.delete(2)
    assert (manager.all_steps(), folders(tmp_path)) == ([1, 3], [1, 3])
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 2 .* there are \[1, 3\]"):
        manager.delete(2)
    with pytest.raises(InvalidArgument):
        manager.delete(-1)


def test_the_newest_step_and_a_base_in_use_are_not_deleted(
    manager: CheckpointManager, tmp_path: Path
) -> None:
    save(manager, 1)
    with pytest.raises(Refused, match="step 1 is the newest"):
        manager.delete(1)
    save(manager, 2, checkpoint_type=CheckpointType.INCREMENTAL)
    with pytest.raises(Refused, match="step 1 is used by"):
        manager.delete(1)
    assert (manager.all_steps(), folders(tmp_path)) == ([1, 2], [1, 2])


def test_coordinators_judge_a_deletion_and_this_host_removes_the_bytes(tmp_path: Path) -> None:
    cluster = Cluster(a=1)
    with coordinated.manager(cluster, tmp_path) as manager:
        coordinated.save(manager, 1, 2, 3)
        pinned = next(c for c in manager.all_checkpoints() if c.step == 1)
        cluster.job.store.settle(lambda job: decide_pin(job, step=1, attempt=pinned.id, who="me", why="mine"))
        for step, why in ((1, "pinned"), (3, "latest")):
            with pytest.raises(Refused, match=why):
                manager.delete(step)
        manager.delete(2)
        assert (manager.all_steps(), folders(tmp_path)) == ([1, 3], [1, 3])


# -- best -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 1)])
def test_the_best_step_is_that_of_the_metric(tmp_path: Path, mode: str, best: int) -> None:
    with CheckpointManager(
        tmp_path, keep_count=9, keep_best=2, best_metric="loss", best_mode=mode
    ) as manager:
        assert manager.best_step() is None
        for step, loss in ((1, "0.9"), (2, "0.5"), (3, "0.1"), (4, "nan"), (5, "")):
            save(manager, step, metadata={"loss": loss})
        save(manager, 6)
        assert manager.best_step() == best


def test_without_a_metric_there_is_no_best_step(manager: CheckpointManager) -> None:
    save(manager, 1, metadata={"loss": "1"})
    assert manager.best_step() is None


# -- when to save -----------------------------------------------------------------------------


def test_should_save_is_true_once_a_step_and_only_at_the_interval(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=4) as manager:
        assert [step for step in range(1, 10) if manager.should_save(step)] == [*range(1, 10)], (
            "none is there yet"
        )
        save(manager, 1)
        assert [step for step in range(10) if manager.should_save(step)] == [4, 8]
        save(manager, 4)
        assert [step for step in range(10) if manager.should_save(step)] == [8]
    with CheckpointManager(tmp_path) as again:
        assert [step for step in range(8) if again.should_save(step)] == [5, 6, 7]
        again.restore({"w": np.zeros(1000)}, 1)
        assert again.should_save(2), "the restore of an earlier step gave up the steps after it"
        assert not again.reached_preemption(2)
    with pytest.raises(ConfigError, match="save_interval_steps must be at least 1"):
        CheckpointManagerConfig(save_interval_steps=0)


def test_due_saves_depend_on_the_restore_point_and_not_on_later_commits(tmp_path: Path) -> None:
    cluster = Cluster(a=1)
    with coordinated.manager(cluster, tmp_path) as manager:
        coordinated.save(manager, 1, 2)
        point = cluster.restore_point()
        coordinated.save(manager, 3)
    with CheckpointManager(tmp_path, client=cluster.port(0, restore=point)) as manager:
        assert manager.latest_step() == 3
        assert [step for step in range(5) if manager.should_save(step)] == [3, 4]


def test_a_save_is_in_progress_until_it_is_committed(tmp_path: Path) -> None:
    cluster = Cluster(a=1)
    with coordinated.manager(cluster, tmp_path) as manager:
        assert not manager.is_saving_in_progress()
        held = threading.Event()

        def hold(_request: Message) -> None:
            held.wait(LIMIT_S)

        cluster.on_call = hold
        info = manager.save_state({"w": np.ones(4)}, 1)
        assert manager.is_saving_in_progress()
        held.set()
        info.wait(LIMIT_S)
        manager.wait_until_finished(LIMIT_S)
        assert not manager.is_saving_in_progress()


# -- settings by their alias names -----------------------------------------------------------


def test_a_config_may_use_alias_names_and_be_the_first_argument(tmp_path: Path) -> None:
    config = CheckpointManagerConfig(storage_backend="local", checkpoint_dir=str(tmp_path), keep_count=5)
    with CheckpointManager(config, keep_count=2) as manager:
        assert (manager.directory, manager.config.keep_count) == (tmp_path, 2)
    with pytest.raises(ConfigError, match="two configurations"):
        CheckpointManager(config, config=config)
    with pytest.raises(ConfigError, match="storage_path is 'a', and checkpoint_dir is 'b'"):
        CheckpointManagerConfig(storage_path="a", checkpoint_dir="b")
    with pytest.raises(ConfigError, match="storage_type is 'nfs'"):
        CheckpointManagerConfig(checkpoint_dir="a", storage_backend="nfs")


# -- files that cannot be removed


def steps_in(root: Path) -> dict[int, Path]:
    return {int(path.name.split("-")[1]): path for path in root.glob("step-*")}


@pytest.mark.parametrize("ended", [True, False])
def test_a_checkpoint_that_cannot_be_removed_is_reported_and_blocks_no_other(
    tmp_path: Path, ended: bool
) -> None:
    """The checkpoint may be committed, or be the rest of an unfinished save."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3, 4):
            manager.save(b"x", step=step).wait()
    folders = steps_in(tmp_path)
    for step in () if ended else (1, 2):
        (folders[step] / MARKER).unlink()
    in_the_way = folders[1] / "rank-00000.json"
    in_the_way.unlink()
    in_the_way.mkdir()
    upkeep = CheckpointManager(tmp_path, keep_count=1)
    upkeep.save(b"x", step=5).wait()
    with pytest.raises(NotAnObject, match="it is a folder") as error:
        upkeep.wait_until_finished()
    assert "move it away" in error.value.hint
    assert set(steps_in(tmp_path)) == {1, 5}
    assert list(folders[1].iterdir()) == [in_the_way], "all else of it has gone"
    in_the_way.rmdir()
    upkeep.save(b"x", step=6).wait()
    upkeep.close()
    assert set(steps_in(tmp_path)) == {6}


def test_deletion_removes_the_marker_first_and_then_everything_possible() -> None:
    storage, held = MemoryStorage(), {MARKER}
    names = [MARKER, "manifest.json", "rank-00000.safetensors", "rank-00000.json", "rank-00001.safetensors"]
    storage.objects |= {f"f/{name}": b"x" for name in names}

    def fault(verb: str, name: str) -> None:
        if verb == "delete" and name.rpartition("/")[2] in held:
            raise StorageError(f"cannot delete {name}")

    storage.fault = fault
    with pytest.raises(StorageError, match=MARKER):
        remove_objects(storage, "f")
    assert len(storage.objects) == len(names)
    held = {"manifest.json", "rank-00000.safetensors"}
    with pytest.raises(StorageError, match="manifest") as error:
        remove_objects(storage, "f")
    assert "rank-00000.safetensors" in error.value.__notes__[0]
    assert sorted(storage.objects) == ["f/manifest.json", "f/rank-00000.safetensors"]
    held = set()
    remove_objects(storage, "f")
    assert not storage.objects


def test_an_unremovable_temporary_file_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    names = [f".x.n{number}.tmp" for number in range(4)]
    for name in names:
        (folder / name).write_bytes(b"")
    unlink = Path.unlink

    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.name == stuck:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", busy)
    stuck = next(folder.iterdir()).name
    storage = LocalStorage(tmp_path, nonce=lambda: "n")
    with pytest.raises(StorageError, match="not permitted"):
        storage.delete_folder("f")
    assert [path.name for path in folder.iterdir()] == [stuck]
    stuck = ""
    storage.delete_folder("f")
    assert not folder.exists()
