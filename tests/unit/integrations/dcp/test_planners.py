"""What DCP's planners make of a state: plain values as JSON, and what reads them besides DCP."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from strata.client.checkpoints import CheckpointManager
from strata.errors import CheckpointError
from strata.integrations.dcp import StrataReader, StrataWriter
from strata.integrations.dcp.planners import from_json, to_json
from tests.unit.integrations.dcp.test_dcp import a_state, flat, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_manager_restores_what_dcp_saved(tmp_path: Path) -> None:
    save(tmp_path, a_state(2.5), 7)
    here = a_state(0)
    with CheckpointManager(tmp_path) as manager:
        restored = manager.restore(here)
    assert restored is not None
    assert flat(here) == flat(a_state(2.5))


def test_a_manager_restores_plain_values_that_dcp_saved(tmp_path: Path) -> None:
    state = {"step": 12, "w": torch.ones(2), "best": float("inf"), "parts": [{"name": "x"}, (1, None)]}
    save(tmp_path, state, 12)
    here = {"step": 0, "w": torch.zeros(2), "best": 0.0, "parts": None}
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(here)
    assert flat(here) == flat(state)


def test_a_manager_says_of_what_torchs_planner_pickled_how_it_is_loaded(tmp_path: Path) -> None:
    writer = StrataWriter(tmp_path)
    dcp_save({"step": 12, "w": torch.ones(2)}, checkpoint_id="12", storage_writer=writer)
    writer.close()
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=r"step was saved as bytes, and is a int here") as error:
            manager.restore({"step": 0})
        assert "through DCP" in error.value.hint
        here = {"w": torch.zeros(2)}
        manager.restore(here)
    assert here["w"].tolist() == [1, 1]


def test_dcp_loads_what_a_manager_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save_state(a_state(2.5), step=4)
    assert flat(load(tmp_path, a_state(0), step=4)) == flat(a_state(2.5))


@pytest.mark.parametrize("by_manager", [True, False])
def test_torchs_planner_is_told_that_values_are_json(by_manager: bool, tmp_path: Path) -> None:
    if by_manager:
        with CheckpointManager(tmp_path) as manager:
            manager.save_state(a_state(), 1)
    else:
        save(tmp_path, a_state(), 1)
    with pytest.raises(CheckpointException, match=r"was saved as JSON, and DefaultLoadPlanner") as error:
        dcp_load(a_state(0), storage_reader=StrataReader(tmp_path))
    assert "planner=JsonLoadPlanner()" in str(error.value)


def test_plain_values_are_json() -> None:
    value = {"a": [1, 2.5, None, float("inf")], "t": (True, "x")}
    assert from_json("k", to_json("k", value)) == value
    with pytest.raises(CheckpointError, match="a tensor or bytes"):
        to_json("k", {"w": b"x"})
    with pytest.raises(CheckpointError, match="not saved as JSON"):
        from_json("k", b"\x80pickle")


def test_torchs_own_planners_work_too(tmp_path: Path) -> None:
    writer = StrataWriter(tmp_path)
    dcp_save(a_state(2.5), checkpoint_id="1", storage_writer=writer)
    writer.close()
    here = a_state(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(here, storage_reader=StrataReader(tmp_path))
    assert flat(here) == flat(a_state(2.5))
