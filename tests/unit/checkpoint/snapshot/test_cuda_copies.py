"""Order of copies and waits for tensors on a device, with fakes. Other tests need a real device."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from strata.checkpoint.save.writer import MAX_IN_FLIGHT
from strata.checkpoint.snapshot import cuda_copies, snapshot
from strata.checkpoint.snapshot.cuda_copies import Copy, CudaCopies, Pending, optimizers_in, owned_by
from strata.checkpoint.snapshot.memory import Arena
from tests.conftest import need
from tests.unit.checkpoint.writer_rig import Rig

if TYPE_CHECKING:
    from strata.checkpoint.snapshot.tensors import TensorSpec

LIMIT_S = 60
BUSY_CYCLES = 4_000_000_000
"""About two seconds of device work, for which `write` must not wait."""


def a_training(device: str = "cpu", width: int = 8) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)).to(device)
    return {"model": model, "optim": torch.optim.Adam(model.parameters(), lr=0.1), "epoch": 3}


def take_a_step(state: dict[str, Any], device: str, width: int) -> None:
    state["optim"].zero_grad()
    state["model"](torch.randn(16, width, device=device)).square().sum().backward()
    state["optim"].step()


def test_optimizers_are_found_and_own_their_parameters_and_no_buffer() -> None:
    """Capturable optimizers are left out: a graph replay skips their hooks, so their steps would not wait."""
    state = a_training()
    replayed = torch.optim.Adam(torch.nn.Linear(2, 2).parameters(), capturable=True)
    assert optimizers_in({"a": [{"b": (state["optim"], replayed)}], "c": state["model"]}) == [state["optim"]]
    assert optimizers_in({"optim": state["optim"].state_dict()}) == []
    owned = owned_by([state["optim"]])
    assert owned == {parameter.data_ptr() for parameter in state["model"].parameters()}


def test_memory_is_pinned_once_and_unpinned_before_its_release() -> None:
    arena, calls = Arena(), []

    def pin(block: memoryview) -> Any:
        calls.append(f"pin {len(block)}")
        return lambda: calls.append("undo")

    arena.take(5000)
    arena.pin(pin)
    arena.take(100)
    arena.pin(pin)
    assert calls == ["pin 8192"]
    arena.take(10_000)
    arena.pin(pin)
    assert calls == ["pin 8192", "undo", "pin 12288"]
    arena.release()
    arena.release()
    assert calls[-1] == "undo"
    assert len(calls) == 4


class Devices:
    """Fakes of CUDA: streams that record the waits on them, and one lost device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, lost: int) -> None:
        self.lost = lost
        self.copied: list[int] = []
        self.waited: list[int] = []
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(cuda_copies, "torch_view", lambda *_: SimpleNamespace(copy_=self.copy))

    def new_stream(self, *, device: torch.device) -> Any:
        def wait() -> None:
            self.waited.append(device.index)

        event = SimpleNamespace(synchronize=wait)
        return SimpleNamespace(
            wait_stream=lambda other: None, record_event=lambda: event, synchronize=wait, device=device
        )

    def current(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_event=lambda event: None)

    def copy(self, value: Any, *, non_blocking: bool) -> None:
        assert non_blocking
        if value.device.index == self.lost:
            raise RuntimeError("CUDA error: device lost")
        self.copied.append(value.device.index)


def on_device(index: int) -> Any:
    value = SimpleNamespace(device=torch.device("cuda", index), data_ptr=lambda: index)
    value.detach = lambda: value
    return value


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_started_copies_finish_before_a_device_failure_is_raised(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    devices = Devices(monkeypatch, lost=lost)
    copies = [Copy(on_device(index), cast("TensorSpec", None), memoryview(b"")) for index in range(3)]
    with pytest.raises(RuntimeError, match="device lost"):
        CudaCopies().start(copies, [])
    assert devices.copied == list(range(lost))
    assert devices.waited == list(range(lost + 1)), "the memory is used again"


def test_a_device_error_at_the_start_fails_the_save_and_frees_its_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()

    def no_device(self: CudaCopies, *args: object) -> None:
        raise RuntimeError("CUDA error: initialization error")

    state = {"w": torch.zeros(1024)}
    monkeypatch.setattr(snapshot, "is_on_device", lambda value: isinstance(value, torch.Tensor))
    monkeypatch.setattr(snapshot, "pin", lambda block: None)
    monkeypatch.setattr(CudaCopies, "start", no_device)
    for _ in range(MAX_IN_FLIGHT + 1):
        with pytest.raises(RuntimeError, match="CUDA error"):
            rig.write(1, state)
    monkeypatch.undo()
    rig.write(1, state).wait(LIMIT_S)
    rig.writer.close()


@pytest.mark.gpu
def test_a_snapshot_is_unaffected_by_later_training_steps() -> None:
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
        info = rig.write(step, state)
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
    rig.write(1, state).wait(LIMIT_S)  # the first save pins the memory
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # torch's own tests use it
    info = rig.write(2, state)
    assert not torch.cuda.current_stream().query(), "the device had not even begun to copy"
    state["w"].zero_()
    info.wait(LIMIT_S)
    assert bool((rig.loaded(2)["w"] == 1).all())
    rig.writer.close()


def test_every_wait_raises_the_device_error() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    pending = Pending(events=[SimpleNamespace(synchronize=fail)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            pending.wait()
