"""DCP's planners: plain values are saved as JSON, and other readers than DCP can read them."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from strata.checkpoint.convert.file_export import choose, export, format_of
from strata.checkpoint.format import inline
from strata.checkpoint.format.marker import committed, read_rank_manifests
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.client.checkpoints.manager import CheckpointManager
from strata.errors import CheckpointCorrupt, CheckpointError
from strata.integrations.dcp import StrataReader, StrataWriter
from strata.integrations.dcp.planners import from_json, to_json
from tests.unit.integrations.dcp.test_dcp import a_state, flat, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_manager_restores_a_dcp_checkpoint(tmp_path: Path) -> None:
    """The manager restores plain values too."""
    plain = {"step": 12, "best": float("inf"), "parts": [{"name": "x"}, (1, None)]}
    save(tmp_path, {**a_state(2.5), **plain}, 7)
    here = {**a_state(0), **dict.fromkeys(plain)}
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(here) is not None
    assert flat(here) == flat({**a_state(2.5), **plain})


def test_a_manager_refuses_a_pickled_value_and_names_dcp_as_its_reader(tmp_path: Path) -> None:
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


def test_dcp_loads_a_manager_s_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save_state(a_state(2.5), step=4)
    assert flat(load(tmp_path, a_state(0), step=4)) == flat(a_state(2.5))


@pytest.mark.parametrize("by_manager", [True, False])
def test_torchs_planner_refuses_json_values_and_the_error_names_the_right_one(
    by_manager: bool, tmp_path: Path
) -> None:
    if by_manager:
        with CheckpointManager(tmp_path) as manager:
            manager.save_state(a_state(), 1)
    else:
        save(tmp_path, a_state(), 1)
    with pytest.raises(CheckpointException, match=r"was saved as JSON, and DefaultLoadPlanner") as error:
        dcp_load(a_state(0), storage_reader=StrataReader(tmp_path))
    assert "planner=JsonLoadPlanner()" in str(error.value)


def test_bytes_that_a_manager_saved_come_back_as_they_are(tmp_path: Path) -> None:
    """This includes bytes that look like JSON, and a pickle."""
    saved = {"number": b"123", "text": b"hello", "tree": b'{"l":[]}', "pickle": pickle.dumps(1), "none": b""}
    with CheckpointManager(tmp_path) as manager:
        manager.save_state({**saved, "w": torch.ones(2)}, 1)
    here = load(tmp_path, {**dict.fromkeys(saved, b"?"), "w": torch.zeros(2)})
    assert {key: here[key] for key in saved} == saved
    for key in saved:
        with pytest.raises(CheckpointException, match=f"{key} was saved as bytes, and DefaultLoad") as error:
            dcp_load({key: b""}, storage_reader=StrataReader(tmp_path))
        assert "planner=JsonLoadPlanner()" in str(error.value)


def test_plain_values_are_json() -> None:
    value = {"a": [1, 2.5, None, float("inf")], "t": (True, "x")}
    assert from_json("k", to_json("k", value)) == value
    with pytest.raises(CheckpointError, match="not saved as JSON"):
        from_json("k", b"\x80pickle")


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_values_that_return_as_another_type_match_the_documentation() -> None:
    """The page is docs/checkpoints.md, "Through torch's DCP"."""
    parameter = (torch.nn.Parameter(torch.ones(2)), 1)
    (tensor, one) = from_json("k", to_json("k", parameter))
    assert (type(tensor), tensor.requires_grad, tensor.tolist(), one) == (torch.Tensor, False, [1, 1], 1)
    for data in (bytearray(b"ab"), memoryview(b"ab")):
        assert from_json("k", to_json("k", data)) == b"ab"
    swapped = from_json("k", to_json("k", np.arange(3, dtype=">i4")))
    assert (swapped.dtype, swapped.tolist()) == (np.dtype("=i4"), [0, 1, 2])
    matrix = from_json("k", to_json("k", np.asmatrix([[1, 2]])))
    assert (type(matrix), matrix.tolist()) == (np.ndarray, [[1, 2]])


def test_torchs_own_planners_work_too(tmp_path: Path) -> None:
    writer = StrataWriter(tmp_path)
    dcp_save(a_state(2.5), checkpoint_id="1", storage_writer=writer)
    writer.close()
    here = a_state(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(here, storage_reader=StrataReader(tmp_path))
    assert flat(here) == flat(a_state(2.5))


def values() -> dict[str, Any]:
    return {
        "bytes": b"\x00\xff",
        "set": {1, "x", (2, None)},
        "frozen": frozenset({1.5}),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "empty": np.zeros((0, 2)),
        "tuple": (torch.arange(3, dtype=torch.bfloat16), {"deep": [b"x", (torch.ones(2, 2).t(),)]}),
        "file": io.BytesIO(b"content"),
    }


def shown(state: dict[str, Any]) -> dict[str, str]:
    return {**{k: repr(v) for k, v in state.items()}, "file": repr(state["file"].getvalue())}


@pytest.mark.parametrize("by_manager", [True, False])
def test_values_that_torchs_planner_accepts_are_saved_without_a_pickle(
    by_manager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, {"values": values(), "w": torch.ones(2)}, 1)
    here = {"values": dict.fromkeys(values()), "w": torch.zeros(2)}
    here["values"]["array"] = np.zeros((2, 3), dtype=np.int16)  # type: ignore[index]  # a dictionary

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("something is unpickled")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", refuse)
        if by_manager:
            with CheckpointManager(tmp_path) as manager:
                manager.restore(here)
        else:
            load(tmp_path, here)
    found: Any = here["values"]
    assert shown(found) == {**shown(values()), "set": repr(found["set"])}
    assert found["set"] == values()["set"]
    assert found["array"].flags.writeable


def test_tensors_and_bytes_within_a_plain_value_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline, "MAX_BYTES", 100)
    to_json("k", (torch.zeros(25), b"x" * 100))
    for value in ((torch.zeros(26),), [b"x" * 101], io.BytesIO(b"x" * 101)):
        with pytest.raises(CheckpointError, match=r"at most 100 are saved within a plain value"):
            to_json("k", value)


@pytest.mark.parametrize(
    "tree",
    [
        {"x": "no base64"},
        {"x": 1},
        {"n": ["dtype", "load"]},
        {"n": ["dtype"]},
        {"n": ["device", "nowhere"]},
        {"n": ["Size", ["x"]]},
        {"n": ["load", "x"]},
        {"a": ["torch", "float32", [2], ""]},
        {"a": ["torch", "uint8", [-1, -1], "AA=="]},
        {"a": ["torch", "nothing", [0], ""]},
        {"a": ["bytes", "uint8", [0], ""]},
        {"e": [{"l": []}]},
        {"e": 1},
    ],
)
def test_malformed_plain_values_are_corrupt(tree: Any) -> None:
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        from_json("k", json.dumps(tree).encode())


NEWER = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2, torch.complex32]


def a_tensor(dtype: torch.dtype, *, filled: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 120, (6, 4 * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return (data if filled else torch.zeros_like(data)).view(dtype)


def as_bytes(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", NEWER, ids=str)
@pytest.mark.parametrize("by_dcp", [True, False])
def test_dtypes_unknown_to_safetensors_round_trip(dtype: torch.dtype, by_dcp: bool, tmp_path: Path) -> None:
    saved = a_tensor(dtype, filled=True)
    state = {"w": saved, "turned": saved.t(), "tuple": (saved,)}
    here = {"w": a_tensor(dtype, filled=False), "turned": a_tensor(dtype, filled=False).t(), "tuple": None}
    if by_dcp:
        save(tmp_path, state, 1)
        load(tmp_path, here)
    else:
        with CheckpointManager(tmp_path) as manager:
            manager.save_state(state, 1)
        with CheckpointManager(tmp_path) as manager:
            manager.restore(here)
    (inner,) = here["tuple"]  # type: ignore[misc]  # a tuple was saved there
    for name, found in (("w", here["w"]), ("turned", here["turned"]), ("tuple", inner)):
        assert isinstance(found, torch.Tensor), name
        assert found.dtype == dtype
        assert as_bytes(found) == as_bytes(saved.t() if name == "turned" else saved), name
    (image,) = tmp_path.glob("step-*/rank-00000.safetensors")
    with safe_open(image, framework="pt") as file:
        assert file.get_tensor("w").flatten().view(torch.uint8).tolist() == as_bytes(saved)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointException, match="w is a tensor without plain memory"):
        save(tmp_path, {"w": quantized}, 1)


def exported(folder: Path, state: dict[str, Any], name: str) -> Path:
    """Save a state through DCP and export it; return the exported file."""
    save(folder / name, state, 1)
    storage = LocalStorage(folder / name, nonce=lambda: "x")
    (saved,) = (each for each in storage.list() if each.startswith("step-"))
    found = committed(storage, saved)
    assert found is not None
    part = choose(read_rank_manifests(storage, saved, found[0]), rank=None, only=None)
    path = folder / f"file-{name}"
    kind = format_of(Path(name), None)
    export(storage, saved, part, path, file_format=kind, replace=False, on_bytes=lambda count: None)
    return path


def test_an_exported_torch_file_has_the_plain_values(tmp_path: Path) -> None:
    """The export replaces torch's `dcp_to_torch_save`, which reads only files of FileSystemWriter."""
    state = {"model": {"w": torch.ones(2)}, "step": 12, "lr": [0.1, {"a": float("inf")}], "raw": b"x"}
    assert flat(torch.load(exported(tmp_path, state, "model.pt"), weights_only=True)) == flat(state)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_dtype_that_numpy_does_not_know_is_exported_otherwise(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2, dtype=torch.complex32)}
    with pytest.raises(CheckpointError, match=r"complex32.*which NumPy does not know") as error:
        exported(tmp_path, state, "w.npz")
    assert error.value.hint == "export it as .pt or .safetensors"
    assert torch.load(exported(tmp_path, state, "w.pt"), weights_only=True)["w"].dtype == torch.complex32
    assert exported(tmp_path, state, "w.safetensors").exists()
