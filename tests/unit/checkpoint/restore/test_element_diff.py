from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.restore import element_diff
from strata.checkpoint.restore.assembling import Assembler
from strata.checkpoint.restore.element_diff import ElementDifference, boxes, count, element_difference
from strata.checkpoint.restore.global_tensors import GlobalTensor, Piece, global_tensors
from strata.checkpoint.save.sharding import Box
from strata.errors import CheckpointCorrupt
from tests.unit.checkpoint.parted import divided
from tests.unit.checkpoint.ranks import Ranks

W = np.arange(60, dtype=np.float32).reshape(5, 12)


def stored(whole: np.ndarray[Any, Any], ranks: int, *, dimension: int = 0) -> tuple[Assembler, GlobalTensor]:
    """Return a saved array, divided among ranks along one dimension; 0 ranks: one rank has it whole."""
    saving = Ranks(max(ranks, 1))
    saving.save(states=[{"w": part} for part in divided(whole, ranks, dimension=dimension)] or [{"w": whole}])
    manifests = [saving.manifest(rank) for rank in range(max(ranks, 1))]
    if ranks:
        tensor = global_tensors(manifests)["w"]
    else:
        spec = manifests[0].tensors["w"].spec
        tensor = GlobalTensor(spec=spec, pieces=(Piece(box=Box.whole(spec.shape), rank=0, name="w"),))
    return Assembler(saving.storage, saving.folder, manifests), tensor


@pytest.mark.parametrize("box_bytes", [4, 20, 100, 10**6])
def test_tensors_that_are_divided_differently_are_compared_in_boxes(
    box_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(element_diff, "BOX_BYTES", box_bytes)
    changed = W.copy()
    changed[0, 0] += 0.25
    changed[4, 5:7] -= 2
    read = 0

    def on_bytes(number: int) -> None:
        nonlocal read
        read += number

    three = stored(W, 3)
    for other in (stored(W, 2), stored(W, 4, dimension=1), stored(W, 0)):
        assert element_difference("w", three, other, on_bytes=on_bytes) is None
    assert read == 3 * 2 * W.nbytes
    for other in (stored(changed, 2), stored(changed, 4, dimension=1), stored(changed, 0)):
        assert element_difference("w", three, other) == ElementDifference(
            elements=60, different=3, largest=2.0
        )


def test_a_damaged_byte_is_an_error_and_no_difference() -> None:
    saving = Ranks(2)
    saving.save(states=[{"w": part} for part in divided(W, 2)])
    manifests = [saving.manifest(rank) for rank in range(2)]
    saving.near.flip(f"{saving.folder}/rank-00001.safetensors", manifests[1].header_bytes)
    with pytest.raises(CheckpointCorrupt, match="tensor w differs from the saved data"):
        element_difference(
            "w",
            (Assembler(saving.storage, saving.folder, manifests), global_tensors(manifests)["w"]),
            stored(W, 3),
        )


def test_boxes_make_up_the_tensor_in_order_and_are_never_too_large() -> None:
    for shape in ((), (7,), (3, 4), (2, 3, 5), (4, 1, 9), (0, 3)):
        for most in (1, 2, 4, 6, 100):
            found = list(boxes(shape, most))
            assert all(0 < box.count <= most for box in found)
            numbers = np.arange(math.prod(shape)).reshape(shape)
            assert [n for box in found for n in numbers[box.slices()].ravel()] == list(numbers.ravel())


def counted(a: Any, b: Any, dtype: str) -> tuple[int | None, float | None]:
    found = count(memoryview(a.tobytes()), memoryview(b.tobytes()), dtype)
    assert found.elements == len(a)
    return found.different, found.largest


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_the_largest_difference_of_numbers_is_found(dtype: str) -> None:
    a = np.array([1, 2, 3, 4], dtype)
    assert counted(a, a + np.array([0, 0.5, -1.5, 0], dtype), dtype) == (2, 1.5)


def test_the_largest_difference_of_bfloat16_is_found() -> None:
    a, b = (
        (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for numbers in ([1, 2, 3], [1, 2.5, 3])
    )
    assert counted(a, b, "bfloat16") == (1, 0.5)


def test_integers_and_other_dtypes_have_a_count_only() -> None:
    a = np.array([1, 2, 3], np.int64)
    assert counted(a, a + 1, "int64") == (3, None)
    assert counted(np.array([True, False]), np.array([True, True]), "bool") == (1, None)
    bits = np.array([1, 2], np.uint8)
    assert counted(bits, bits + np.uint8(1), "float8_e5m2") == (2, None)


def test_nan_equals_nan_of_the_same_bits_and_negative_zero_differs_from_zero() -> None:
    a, b = np.array([np.nan, 0.0, 1.0], np.float32), np.array([np.nan, -0.0, 1.0], np.float32)
    assert counted(a, b, "float32") == (1, 0.0)
    different, largest = counted(a, np.array([np.nan, np.nan, 2.0], np.float32), "float32")
    assert different == 2
    assert largest is not None
    assert math.isnan(largest)
    assert counted(np.array([np.inf, 1]), np.array([-np.inf, 2]), "float64") == (2, math.inf)


def test_without_numpy_the_elements_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = stored(W, 3), stored(W + 1, 2)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert element_difference("w", one, other) == ElementDifference(elements=60, different=None, largest=None)
