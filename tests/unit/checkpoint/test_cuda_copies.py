"""What waits for what when tensors lie on a device; the device's own part needs one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from strata.checkpoint.catalog import SaveRequest
from strata.checkpoint.cuda_copies import optimizers_in, owned_by
from strata.checkpoint.memory import Arena
from strata.checkpoint.reader import load
from strata.checkpoint.saving import Saver
from strata.checkpoint.writer import AsyncCheckpointWriter
from tests.conftest import need
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import local_catalog

LIMIT_S = 60


def a_training(device: str = "cpu", width: int = 8) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)).to(device)
    return {"model": model, "optim": torch.optim.Adam(model.parameters(), lr=0.1), "epoch": 3}


def take_a_step(state: dict[str, Any], device: str, width: int) -> None:
    state["optim"].zero_grad()
    state["model"](torch.randn(16, width, device=device)).square().sum().backward()
    state["optim"].step()


def test_optimizers_are_found_wherever_they_are() -> None:
    state = a_training()
    assert optimizers_in({"a": [{"b": (state["optim"],)}], "c": state["model"]}) == [state["optim"]]
    assert optimizers_in({"optim": state["optim"].state_dict()}) == []
    assert optimizers_in(b"opaque") == []


def test_one_that_may_be_replayed_past_its_hooks_is_not_waited_for_by_them() -> None:
    model = torch.nn.Linear(2, 2)
    assert optimizers_in({"o": torch.optim.Adam(model.parameters(), capturable=True)}) == []


def test_an_optimizer_owns_its_parameters_and_no_buffer() -> None:
    state = a_training()
    owned = owned_by([state["optim"]])
    assert owned == {parameter.data_ptr() for parameter in state["model"].parameters()}
    assert owned.isdisjoint(buffer.data_ptr() for buffer in state["model"].buffers())


def test_memory_is_pinned_once_and_undone_before_it_goes() -> None:
    arena, told = Arena(), []

    def pin(block: memoryview) -> Any:
        told.append(f"pin {len(block)}")
        return lambda: told.append("undo")

    arena.take(5000)
    arena.pin(pin)
    arena.take(100)
    arena.pin(pin)
    assert told == ["pin 8192"]
    arena.take(10_000)
    arena.pin(pin)
    assert told == ["pin 8192", "undo", "pin 12288"]
    arena.release()
    arena.release()
    assert told[-1] == "undo"
    assert len(told) == 4


class Rig:
    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.catalog = local_catalog(self.storage)
        saver = Saver(storage=self.storage, catalog=self.catalog, commit_timeout_s=LIMIT_S)
        self.writer = AsyncCheckpointWriter(saver)

    def loaded(self, step: int) -> Any:
        (found,) = (c for c in self.catalog.all() if c.step == step)
        folder = self.catalog.folder(found)
        saved = load(self.storage, folder, manifest_digest=found.manifest_digest, rank=0).saved
        return saved.value(saved.tree)


@pytest.mark.gpu
def test_a_snapshot_is_of_the_moment_it_was_taken_whatever_is_done_next() -> None:
    need("gpu", torch.cuda.is_available(), "run it on a host with a CUDA device")
    width = 2048
    state, rig = a_training("cuda", width), Rig()
    take_a_step(state, "cuda", width)
    for step in range(1, 6):
        before = {name: value.clone() for name, value in state["model"].state_dict().items()}
        moments = {
            key: {name: item.clone() for name, item in own.items()}
            for key, own in state["optim"].state_dict()["state"].items()
        }
        info = rig.writer.write(state, SaveRequest(step=step))
        take_a_step(state, "cuda", width)
        state["model"][1].running_mean.add_(1)
        info.wait(LIMIT_S)
        saved = rig.loaded(step)
        for name, value in before.items():
            assert torch.equal(saved["model"][name], value.cpu()), name
        for key, own in moments.items():
            for name, item in own.items():
                assert torch.equal(saved["optim"]["state"][key][name], item.cpu()), name
    rig.writer.close()


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_copy() -> None:
    need("gpu", torch.cuda.is_available(), "run it on a host with a CUDA device")
    rig = Rig()
    state: dict[str, Any] = {"w": torch.ones(1 << 28, device="cuda"), "step": 1}
    rig.writer.write(state, SaveRequest(step=1)).wait(LIMIT_S)  # memory is pinned now
    torch.cuda.synchronize()
    began = time.perf_counter()
    info = rig.writer.write(state, SaveRequest(step=2))
    returned_s = time.perf_counter() - began
    state["w"].zero_()
    torch.cuda.synchronize()
    copied_s = time.perf_counter() - began
    info.wait(LIMIT_S)
    assert returned_s < copied_s
    assert bool((rig.loaded(2)["w"] == 1).all())
    rig.writer.close()
