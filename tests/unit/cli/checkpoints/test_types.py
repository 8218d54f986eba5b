"""`strata checkpoints` on Incrementals, some of whose chunks are in other checkpoints' images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from strata.client.checkpoints.manager import CheckpointManager
from strata.core.kv.records import CheckpointType
from tests.unit.cli.checkpoints.test_checkpoints import damage, image, run, values


def a_state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full(10, float(step)), "frozen": np.arange(1000, dtype=np.int16)}, "step": step}


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A root with a Full of step 10, and Incrementals of steps 20 and 30."""
    folder = tmp_path / "root"
    with CheckpointManager(folder, capture_rng=False) as manager:
        for step in (10, 20, 30):
            manager.save_state(a_state(step), step, 0, CheckpointType.INCREMENTAL).wait()
    return folder


def test_list_and_show_name_the_checkpoint_type(where: Path) -> None:
    assert [c["type"] for c in values("list", "-s", where)] == ["full", "incremental", "incremental"]
    output = run("show", 30, "--tensors", "-s", where)
    assert "incremental" in output
    assert "model.frozen" in output


def test_an_incremental_is_exported_with_the_chunks_of_its_base(where: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    run("export", 30, out, "--only", "model", "-s", where)
    tensors = load_file(out)
    assert np.array_equal(tensors["w"], np.full(10, 30.0))
    assert np.array_equal(tensors["frozen"], np.arange(1000))


def test_damage_in_a_base_is_found_in_every_checkpoint_that_uses_it(where: Path) -> None:
    run("verify", "--all", "-s", where)
    damage(image(where, 10), 4096 + 100)
    for step in (20, 30):
        assert "model.frozen" in run("verify", step, "-s", where, code=1)


def test_gc_keeps_a_base_in_use_and_removes_the_rest(where: Path) -> None:
    assert "is used by" in run("delete", 10, "--yes", "-s", where, code=4)
    output = run("gc", "--keep-count", 1, "-s", where)
    assert "step 10, generation 1" in output
    assert "stays" in output
    assert [c["step"] for c in values("list", "-s", where)] == [10, 30]
    with CheckpointManager(where, capture_rng=False) as manager:
        manager.save_state(a_state(40), 40).wait()
    run("gc", "--keep-count", 1, "-s", where)
    assert [c["step"] for c in values("list", "-s", where)] == [40]
