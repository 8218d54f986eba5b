"""`CheckpointManager` without coordinators."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.marker import NAME as MARKER
from strata.client.checkpoints import CheckpointManager, CheckpointManagerConfig
from strata.core.records import CheckpointState, CheckpointType
from strata.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    InvalidArgument,
    StorageError,
)

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


def test_there_may_be_nothing_to_restore(
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


# -- nothing corrupt is ever loaded -----------------------------------------------------------


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


def test_a_corrupt_one_is_kept_until_there_are_enough_newer_ones(tmp_path: Path) -> None:
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
        manager.save(b"", 1, epoch="x")  # type: ignore[arg-type]  # on purpose
    for step in (-1, 1.5, True, "7", 10**12):
        with pytest.raises(InvalidArgument, match="step"):
            manager.save(b"", step)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidArgument, match="save_state"):
        manager.save({"a": 1}, 1)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidArgument, match="mapping"):
        manager.save_state([1], 1)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidArgument, match="metadata"):
        manager.save(b"", 1, metadata={"a": 1})  # type: ignore[dict-item]  # on purpose


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


def test_looking_writes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root") as manager:
        manager.restore({})
    assert not (tmp_path / "root").exists()


# -- the end ----------------------------------------------------------------------------------


def fails(info: object) -> None:
    raise StorageError("disk full")


def test_the_context_raises_what_a_save_failed_of(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="disk full"), CheckpointManager(tmp_path) as manager:
        manager.save(b"x", 1, progress=fails)


@pytest.mark.parametrize("asks", ["a save", "check_for_errors", "wait_until_finished", "close"])
def test_after_settle_the_next_save_is_made_and_then_the_old_error_is_raised(
    tmp_path: Path, asks: str
) -> None:
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
