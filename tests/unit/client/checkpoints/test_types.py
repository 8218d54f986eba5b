"""Incremental, ModelOnly and OptimizerOnly checkpoints, without coordinators."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.kv.records import CheckpointType
from strata.errors import CheckpointCorrupt, CheckpointError, Conflict, InvalidArgument

FULL, INCREMENTAL = CheckpointType.FULL, CheckpointType.INCREMENTAL
MODEL_ONLY, OPTIMIZER_ONLY = CheckpointType.MODEL_ONLY, CheckpointType.OPTIMIZER_ONLY
LIMIT_S = 20
HEADER_BYTES = 4096


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "root", capture_rng=False) as manager:
        yield manager


def a_state() -> dict[str, Any]:
    """Return a state: one tensor of three chunks, one of one chunk, and some smaller values."""
    return {
        "big": np.arange(3 * CHUNK_BYTES // 8, dtype=np.float64),
        "one": np.zeros(CHUNK_BYTES // 4, dtype=np.float32),
        "small": np.arange(5),
        "step": 0,
    }


def saved(manager: CheckpointManager, state: Any, step: int, kind: CheckpointType = INCREMENTAL) -> int:
    """Save, and return the number of tensor bytes in the image."""
    info = manager.save_state(state, step, 0, kind).wait(LIMIT_S)
    return info.bytes_written - HEADER_BYTES


def image(root: Path, step: int) -> Path:
    (path,) = root.glob(f"root/step-{step:012d}-*/rank-00000.safetensors")
    return path


def kinds(manager: CheckpointManager) -> dict[int, CheckpointType]:
    return {c.step: c.checkpoint_type for c in manager.all_checkpoints()}


# -- Incremental ------------------------------------------------------------------------------


def test_only_chunks_that_changed_are_written_and_all_come_back(
    manager: CheckpointManager, tmp_path: Path
) -> None:
    state = a_state()
    saved(manager, state, 1)
    state["big"][CHUNK_BYTES // 8] = -1  # in the second chunk
    state["small"] += 1
    state["step"] = 2
    assert saved(manager, state, 2) == CHUNK_BYTES + 5 * 8
    assert kinds(manager) == {1: FULL, 2: INCREMENTAL}
    back = {name: np.zeros_like(value) for name, value in state.items() if name != "step"} | {"step": 0}
    assert manager.restore(back) is not None
    for name, value in state.items():
        assert np.array_equal(back[name], value), name
    read = safetensors.numpy.load_file(image(tmp_path, 2))
    assert read.keys() == {"big[1:2]", "small"}
    assert read["big[1:2]"].view(np.float64)[0] == -1
    assert read["small"].tolist() == [1, 2, 3, 4, 5]


def test_opaque_bytes_are_compared_too(manager: CheckpointManager) -> None:
    data = bytearray(3 * CHUNK_BYTES + 7)
    manager.save(data, 1, 0, CheckpointType.INCREMENTAL)
    data[-1] = 9
    info = manager.save(data, 2, 0, CheckpointType.INCREMENTAL).wait(LIMIT_S)
    assert info.bytes_written - HEADER_BYTES == 7
    assert manager.load_bytes() == data


def test_an_incremental_builds_on_a_checkpoint_of_another_process(tmp_path: Path) -> None:
    state = a_state()
    for step in (1, 2, 3):
        with CheckpointManager(tmp_path / "root", capture_rng=False) as manager:
            assert saved(manager, state, step) == (0 if step > 1 else 4 * CHUNK_BYTES + 40)


def test_an_incremental_after_a_rollback_ignores_the_abandoned_steps(
    manager: CheckpointManager,
) -> None:
    state = a_state()
    for step in (1, 2):
        state["big"][0] = step
        saved(manager, state, step)
    manager.restore(state, step=1)
    state["one"][0] = 7
    saved(manager, state, 3)
    back = {"big": np.zeros_like(state["big"]), "one": np.zeros_like(state["one"])}
    manager.restore(back)
    assert (back["big"][0], back["one"][0]) == (1, 7)


@pytest.mark.parametrize("harm", ["image", "manifest", "truncated"])
def test_an_incremental_does_not_use_a_damaged_base(
    manager: CheckpointManager, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(manager, a_state(), 1)
    path = image(tmp_path, 1)
    if harm == "image":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        (path.parent / "rank-00000.json").write_text("{")
    with caplog.at_level(logging.INFO):
        saved(manager, a_state(), 2)
    assert "step 2 is saved whole" in caplog.text
    assert kinds(manager)[2] is FULL
    assert manager.restore(a_state()) is not None


def test_a_flipped_bit_of_a_base_fails_its_users_and_an_earlier_checkpoint_is_restored(
    manager: CheckpointManager, tmp_path: Path
) -> None:
    state = a_state()
    saved(manager, state, 1, FULL)
    saved(manager, {**state, "one": state["one"] + 1}, 2, FULL)
    saved(manager, {**state, "one": state["one"] + 2}, 3)
    path = image(tmp_path, 2)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 5] ^= 1  # in `big`, whose bytes step 3 uses from step 2
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=f"{path.parent.name}/rank-00000.safetensors: tensor big"):
        manager.restore(a_state(), step=3)
    back = a_state()
    found = manager.restore(back)
    assert found is not None
    assert found.step == 1


# -- files that Incrementals use are kept -----------------------------------------------------


def test_a_base_checkpoint_stays_as_long_as_an_incremental_uses_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root", capture_rng=False, keep_count=2) as manager:
        state = a_state()
        for step in range(1, 6):
            state["one"][0] = step
            saved(manager, state, step)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 4, 5], "the first has what never changed"
        for step in (6, 7):
            saved(manager, state, step, FULL)
        manager.wait_until_finished()
        assert manager.all_steps() == [6, 7]
    assert len(list(tmp_path.glob("root/step-*"))) == 2


# -- parts of a state -------------------------------------------------------------------------


def a_training(fill: float = 1.0) -> dict[str, Any]:
    net = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(net.weight, fill)
    moments = {"exp_avg": torch.full((2, 3), fill), "lr": fill}
    return {"model": net, "optimizer": moments, "progress": {"step": 5}}


def test_a_partial_checkpoint_holds_only_its_keys_and_is_not_a_restore_point(
    manager: CheckpointManager, tmp_path: Path
) -> None:
    training = a_training()
    saved(manager, training, 1, FULL)
    saved(manager, training, 2, MODEL_ONLY)
    saved(manager, training, 3, OPTIMIZER_ONLY)
    assert kinds(manager) == {1: FULL, 2: MODEL_ONLY, 3: OPTIMIZER_ONLY}
    assert safetensors.torch.load_file(image(tmp_path, 2)).keys() == {"model.weight", "model.bias"}
    assert all(name.startswith("optimizer.") for name in safetensors.torch.load_file(image(tmp_path, 3)))
    assert (manager.latest_step(), manager.all_steps()) == (1, [1, 2, 3])
    found = manager.restore(a_training())
    assert found is not None
    assert found.step == 1
    hashes = {c.step: c.model_hash for c in manager.all_checkpoints()}
    assert hashes[1] == hashes[2], "equal for equal weights"


def test_several_parts_are_restored_in_one_pass(manager: CheckpointManager) -> None:
    then, now = a_training(2), a_training(0)
    saved(manager, then, 1, MODEL_ONLY)
    saved(manager, then, 2, OPTIMIZER_ONLY)
    parts = {"model": now["model"], "optimizer": now["optimizer"]}
    found = manager.restore(parts, step=[1, 2])
    assert found is not None
    assert found.step == 1
    assert torch.equal(now["model"].weight, then["model"].weight)
    assert torch.equal(now["optimizer"]["exp_avg"], then["optimizer"]["exp_avg"])
    assert now["optimizer"]["lr"] == 2


def test_of_several_checkpoints_the_first_that_holds_a_key_counts(manager: CheckpointManager) -> None:
    saved(manager, {"model": np.zeros(2), "rest": 1}, 1, FULL)
    saved(manager, {"model": np.ones(2), "rest": 2}, 2, MODEL_ONLY)
    state: dict[str, Any] = {"model": np.full(2, 9.0), "rest": 9}
    manager.restore(state, step=[2, 1])
    assert (state["model"].tolist(), state["rest"]) == ([1, 1], 1)


def test_restoring_a_partial_checkpoint_into_a_whole_state_fails_and_changes_nothing(
    manager: CheckpointManager,
) -> None:
    saved(manager, {"model": np.ones(2), "rest": 2}, 2, MODEL_ONLY)
    state: dict[str, Any] = {"model": np.zeros(2), "rest": 9}
    with pytest.raises(
        CheckpointError, match=r"rest is not in the checkpoint, which holds .'model'."
    ) as caught:
        manager.restore(state, step=2)
    assert "several steps" in (caught.value.hint or "")
    assert state["model"].tolist() == [0, 0]


def test_a_part_carries_no_random_state(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save_state({"model": np.zeros(2)}, 1, checkpoint_type=MODEL_ONLY)
        state = {"model": np.ones(2)}
        np.random.seed(4)
        before = np.random.get_state()[1]  # type: ignore[index]  # a tuple
        manager.restore(state, step=1)
        assert np.array_equal(np.random.get_state()[1], before)  # type: ignore[index]  # as above


def test_an_incremental_does_not_build_on_a_part(manager: CheckpointManager) -> None:
    saved(manager, {"model": np.zeros(CHUNK_BYTES, np.uint8)}, 1, MODEL_ONLY)
    saved(manager, {"model": np.zeros(CHUNK_BYTES, np.uint8)}, 2)
    assert kinds(manager)[2] is FULL


@pytest.mark.parametrize("kind", [MODEL_ONLY, OPTIMIZER_ONLY])
def test_an_empty_partial_checkpoint_is_refused_with_its_keys_and_patterns(
    manager: CheckpointManager, kind: CheckpointType
) -> None:
    with pytest.raises(CheckpointError, match=rf"{kind.name} would hold nothing .*'weights'") as caught:
        manager.save_state({"weights": 1}, 1, checkpoint_type=kind)
    assert kind.value.replace("only", "keys") in (caught.value.hint or "")
    assert manager.all_checkpoints() == []


def test_model_and_optimizer_keys_are_configurable(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root", model_keys=["net", "ema.*"], optimizer_keys=["m"]) as manager:
        state = {"net": np.zeros(1), "ema.1": np.ones(1), "m": np.zeros(2), "model": np.ones(3)}
        saved(manager, state, 1, MODEL_ONLY)
        saved(manager, state, 2, OPTIMIZER_ONLY)
    assert safetensors.numpy.load_file(image(tmp_path, 1)).keys() == {"net", "ema.1"}
    assert safetensors.numpy.load_file(image(tmp_path, 2)).keys() == {"m"}


def test_a_step_with_a_partial_checkpoint_conflicts_with_a_full_save(manager: CheckpointManager) -> None:
    state = {"model": np.zeros(1), "rest": 1}
    saved(manager, state, 1, MODEL_ONLY)
    with pytest.raises(Conflict, match="step 1 is saved already, as model_only"):
        manager.save_state(state, 1).wait(LIMIT_S)
    saved(manager, state, 2, FULL)
    assert manager.save_state(state, 2, 0, MODEL_ONLY).wait(LIMIT_S).checkpoint_type is FULL


@pytest.mark.parametrize("kind", ["model_only", "full", "incremental", "optimizer_only"])
def test_a_type_may_be_given_by_its_name(manager: CheckpointManager, kind: str) -> None:
    manager.save_state({"model": 1, "optim": 2}, 1, 0, kind).wait(LIMIT_S)
    assert kinds(manager) == {1: CheckpointType.FULL if kind == "incremental" else CheckpointType(kind)}


@pytest.mark.parametrize("kind", ["fully", None, 3])
def test_an_unknown_checkpoint_type_is_refused(manager: CheckpointManager, kind: Any) -> None:
    with pytest.raises(InvalidArgument, match="no type of a checkpoint"):
        manager.save_state({"a": 1}, 1, 0, kind)
