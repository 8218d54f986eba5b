"""Import of other programs' files: their tensors arrive unchanged, and a forbidden construct is refused by name."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.checkpoint.convert.file_import import STATE_KEY, read_file
from strata.checkpoint.snapshot.state import Flat, unflatten
from strata.checkpoint.snapshot.tensors import StoredTensor, build
from strata.errors import CheckpointError, ConfigError


def data_of(tensor: StoredTensor) -> Any:
    data = memoryview(bytearray(tensor.spec.size_bytes))
    tensor.read_into(data)
    return build("x", tensor.spec, data)


def torch_file(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.uint16, torch.complex128], ids=str)
def test_every_dtype_of_a_torch_file(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = torch.arange(12).reshape(3, 4).to(torch.float32).to(dtype)
    imported = read_file(torch_file(tmp_path / "m.pt", {"w": saved}))
    back = data_of(imported.state["model"]["w"])
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), saved.view(torch.uint8))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[1:, 2:],
        lambda t: t[:, ::2],
        lambda t: t[1].expand(3, 6),
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: t.reshape(2, 2, 3, 2).permute(3, 1, 0, 2),
        lambda t: t.to(torch.complex128).t(),
    ],
    ids=[
        "transposed",
        "a corner",
        "every second",
        "expanded",
        "one number",
        "nothing",
        "permuted",
        "complex",
    ],
)
def test_noncontiguous_tensors_are_imported(tmp_path: Path, view: Any) -> None:
    saved = view(torch.arange(24, dtype=torch.float64).reshape(4, 6))
    back = data_of(read_file(torch_file(tmp_path / "m.pt", {"w": saved})).state["model"]["w"])
    assert torch.equal(back, saved)


def test_a_whole_training_state_is_imported_unchanged(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    state = {"model": model.state_dict(), "optim": optim.state_dict(), "epoch": 3}
    imported, flat = read_file(torch_file(tmp_path / "all.pt", state)), Flat()
    back = unflatten(flat.add("", imported.state), lambda name: data_of(flat.tensors[name][1]))
    assert (list(back), back["epoch"], type(back["model"])) == (["model", "optim", "epoch"], 3, OrderedDict)
    for name, tensor in model.state_dict().items():
        assert torch.equal(back["model"][name], tensor), name
    assert back["optim"]["param_groups"] == optim.state_dict()["param_groups"]
    assert back["optim"]["state"][0]["step"] == 1


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    state = read_file(torch_file(tmp_path / "m.pt", {"a": weight, "b": weight, "c": torch.ones(3)})).state[
        "model"
    ]
    flat = Flat()
    flat.add("", state)
    assert sorted(flat.tensors) == ["a", "c"]


class Evil:
    def __init__(self, *words: Any) -> None:
        self.words = words

    def __reduce__(self) -> Any:
        return self.words


def pickled(path: Path, program: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", bytes(64))
    return path


@pytest.mark.parametrize(
    "evil",
    [
        Evil(exec, ("raise SystemExit(3)",)),
        Evil(print, ("ran",)),
        Evil(getattr, ("x", "upper")),
        Evil(torch.load, ("x",)),
        Evil(torch.hub.load, ("x", "y")),
    ],
    ids=["exec", "print", "getattr", "torch.load", "torch.hub.load"],
)
def test_a_torch_file_that_calls_any_function_is_refused(tmp_path: Path, evil: Evil) -> None:
    path = pickled(tmp_path / "evil.pt", pickle.dumps({"w": evil}, protocol=2))
    with pytest.raises(CheckpointError, match="is neither a tensor nor a plain value"):
        read_file(path)


def tensor_program(shape: Any, strides: Any, offset: Any = 0, key: str = "0") -> bytes:
    """Return a pickle that rebuilds a tensor over a storage, like torch's own."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", 16) if isinstance(obj, Storage) else None

    out = io.BytesIO()
    rebuild = Evil(torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, strides, False, OrderedDict()))
    Pickler(out, protocol=2).dump({"w": rebuild})
    return out.getvalue()


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((17,), (1,), 0),
        ((4,), (5,), 1),
        ((4,), (-1,), 4),
        ((-4,), (1,), 0),
        ((2, 2), (1,), 0),
        (("4",), (1,), 0),
    ],
)
def test_a_tensor_outside_of_its_storage_is_refused(
    tmp_path: Path, shape: Any, strides: Any, offset: int
) -> None:
    good = read_file(pickled(tmp_path / "good.pt", tensor_program((4, 4), (4, 1))))
    assert good.tensors["w"].shape == (4, 4)
    with pytest.raises(CheckpointError):
        read_file(pickled(tmp_path / "bad.pt", tensor_program(shape, strides, offset)))


def test_truncated_and_foreign_files_are_refused(tmp_path: Path) -> None:
    whole = torch_file(tmp_path / "m.pt", {"w": torch.arange(1000)}).read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "part.pt").write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_file(tmp_path / "part.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a mapping"):
        read_file(torch_file(tmp_path / "list.pt", [torch.ones(1)]))
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(CheckpointError, match=r"none that torch\.save wrote"):
        read_file(tmp_path / "other.zip")
    with pytest.raises(ConfigError, match="cannot read"):
        read_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot read"):
        read_file(tmp_path)


def test_the_byte_order_entry_is_measured_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros compress to almost nothing in an archive, but take their full size in memory."""
    read, sizes = zipfile.ZipFile.read, list[int]()

    def reads(archive: zipfile.ZipFile, name: Any, pwd: bytes | None = None) -> bytes:
        sizes.append(archive.getinfo(getattr(name, "filename", name)).file_size)
        return read(archive, name, pwd)

    monkeypatch.setattr(zipfile.ZipFile, "read", reads)
    for order in (bytes(32 << 20), b"big"):
        path = pickled(tmp_path / "m.pt", pickle.dumps({}))
        with zipfile.ZipFile(path, "a", compression=zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/byteorder", order)
        with pytest.raises(CheckpointError, match="little-endian machine"):
            read_file(path)
    assert max(sizes) < 1000


def safetensors(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"{ ", "is no JSON"),
        (b"[]", "is no JSON object"),
        (entry(data_offsets=[0, 16]), "cannot lie in"),
        (entry(data_offsets=[8, 0]), "cannot lie in"),
        (entry(data_offsets=[-8, 0]), "a number in it is no size"),
        (entry(shape=[2.0]), "a number in it is no size"),
        (entry(shape=[3]), "cannot lie in"),
        (entry(dtype="F4"), "tensor w has the dtype F4"),
        ({"w": 7}, "is described wrongly"),
        ({**entry(), "__metadata__": {STATE_KEY: "{"}}, "the tree of its state cannot be read"),
        ({**entry(), "__metadata__": {STATE_KEY: '{"tree": {"t": "v"}, "kinds": {}}'}}, "cannot be read"),
    ],
)
def test_a_safetensors_file_with_a_false_header_is_refused(tmp_path: Path, header: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_file(safetensors(tmp_path / "m.safetensors", header, bytes(8)))


def test_a_safetensors_file_is_imported_under_its_key(tmp_path: Path) -> None:
    data = np.array([1.5, -2], np.float32).tobytes()
    imported = read_file(safetensors(tmp_path / "m.safetensors", entry(), data), key="net")
    assert list(imported.state) == ["net"]
    tensor = imported.state["net"]["w"]
    assert data_of(tensor).tolist() == [1.5, -2]
    flat = Flat()
    assert unflatten(flat.add("", imported.state), lambda name: name) == {"net": {"w": "net.w"}}
