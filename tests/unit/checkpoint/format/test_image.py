from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from strata.checkpoint.format.digest import CHUNK_BYTES, chunks, digest
from strata.checkpoint.format.image import lay_out
from strata.checkpoint.snapshot.tensors import DTYPES, TensorSpec
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import local_catalog, save

EVERY_DTYPE = [name for name, dtype in DTYPES.items() if not dtype.trailing]


def image_of(state: dict[str, object]) -> bytes:
    storage = MemoryStorage()
    save(storage, local_catalog(storage), state, 1)
    (image,) = (data for name, data in storage.objects.items() if name.endswith(".safetensors"))
    return image


def test_safetensors_reads_an_image_as_it_is(tmp_path: Path) -> None:
    state = {name: torch.arange(7).to(getattr(torch, name)) for name in EVERY_DTYPE}
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.empty(0, 3)
    path = tmp_path / "image.safetensors"
    path.write_bytes(image_of(dict(state)))
    read = safetensors.torch.load_file(path)
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def test_numpy_reads_an_image_and_a_wide_complex_becomes_a_pair() -> None:
    state = {"f": np.arange(6.0).reshape(2, 3), "c": np.array([1 + 2j, 3 - 4j]), "raw": b"opaque"}
    read = safetensors.numpy.load(image_of(dict(state)))
    assert read["f"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["c"].tolist() == [[1, 2], [3, -4]]
    assert read["raw"].tobytes() == b"opaque"


@pytest.mark.parametrize("count", [0, 1, 50, 400])
def test_the_header_is_padded_and_the_file_ends_with_its_data(count: int) -> None:
    specs = {f"tensor-{i}": TensorSpec(kind="numpy", dtype="int8", shape=(3,)) for i in range(count)}
    layout = lay_out(specs)
    assert len(layout.header) % 4096 == 0
    assert int.from_bytes(layout.header[:8], "little") == len(layout.header) - 8
    assert json.loads(layout.header[8:])["__metadata__"]["format"] == "pt"
    assert layout.size_bytes == len(layout.header) + 3 * count
    assert len(safetensors.numpy.load(layout.header + bytes(3 * count))) == count


def test_every_tensor_is_aligned_to_its_items_and_no_byte_is_between_them() -> None:
    specs = {
        f"{dtype}-{count}": TensorSpec(kind="torch", dtype=dtype, shape=(count,))
        for dtype in DTYPES
        for count in (1, 3, 5)
    }
    layout = lay_out(specs)
    at = len(layout.header)
    for place in layout.places.values():
        assert place.start == at
        assert place.start % min(DTYPES[place.spec.dtype].item_bytes, 8) == 0
        at = place.end
    assert at == layout.size_bytes


def test_chunks_cover_everything_once() -> None:
    data = memoryview(bytes(2 * CHUNK_BYTES + 5))
    assert [len(chunk) for chunk in chunks(data)] == [CHUNK_BYTES, CHUNK_BYTES, 5]
    assert list(chunks(data[:0])) == []
    assert digest(b"") == "99aa06d3014798d86001c324468d497f", "xxh3-128 of nothing, as published"
