"""The elements that differ between a tensor in two checkpoints, however its bytes are divided in each of them.

Both tensors are read in boxes of at most `BOX_BYTES`, and every byte is verified. So the memory does not depend on the
tensor's size; only each part that lies beside others in a box takes up to two chunks more. Elements are compared bit by
bit: two NaN of the same bits are equal, 0.0 and -0.0 are not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from strata.checkpoint.format.digest import CHUNK_BYTES, digest
from strata.checkpoint.restore.assembling import Assembler, requested_tensor
from strata.checkpoint.restore.global_tensors import GlobalTensor
from strata.checkpoint.restore.verify import OnBytes
from strata.checkpoint.save.sharding import Box, Shape
from strata.checkpoint.snapshot.tensors import DTYPES
from strata.checkpoint.storage.sink import unobserved

BOX_BYTES: Final = 4 * CHUNK_BYTES
_NUMBERS: Final = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
"""The dtypes whose bits NumPy reads as floating-point numbers; bfloat16 is the first half of a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementDifference:
    """How many of a tensor's elements differ, and the largest absolute difference.

    `largest` is NaN if one of two different elements is NaN, and None for other dtypes than floating-point ones of 16
    bits or more. Without NumPy, both are None.
    """

    elements: int
    different: int | None
    largest: float | None


def element_difference(
    name: str,
    a: tuple[Assembler, GlobalTensor],
    b: tuple[Assembler, GlobalTensor],
    *,
    on_bytes: OnBytes = unobserved,
) -> ElementDifference | None:
    """Read the tensor `name` from two checkpoints; return None if all bits are equal.

    Both tensors must have the same dtype and shape. `CheckpointCorrupt` if a byte differs from the saved one.
    """
    _numpy()  # loaded now, so that the assemblers copy with it
    whole = a[1]
    found: list[ElementDifference] = []
    item_bytes = DTYPES[whole.spec.dtype].item_bytes
    for box in boxes(whole.shape, BOX_BYTES // item_bytes):
        different = _in_box(name, a, b, box)
        if different is not None:
            found.append(different)
        on_bytes(2 * box.count * item_bytes)
    if not found:
        return None
    counts = [each.different for each in found if each.different is not None]
    sizes = [each.largest for each in found if each.largest is not None]
    return ElementDifference(
        elements=math.prod(whole.shape),
        different=sum(counts) if counts else None,
        largest=(math.nan if any(map(math.isnan, sizes)) else max(sizes)) if sizes else None,
    )


def _in_box(
    name: str, a: tuple[Assembler, GlobalTensor], b: tuple[Assembler, GlobalTensor], box: Box
) -> ElementDifference | None:
    data, other = (
        assembler.read({name: requested_tensor(name, tensor, box)})[name] for assembler, tensor in (a, b)
    )
    return None if digest(data) == digest(other) else count(data, other, a[1].spec.dtype)


def boxes(shape: Shape, most: int) -> Iterator[Box]:
    """Yield boxes of at most `most` elements that make up a tensor of this shape, in the order of its bytes."""
    if math.prod(shape) <= most:
        if math.prod(shape):
            yield Box.whole(shape)
        return
    cut = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= most)
    inner = shape[cut + 1 :]
    length = most // math.prod(inner)
    for outer in itertools.product(*map(range, shape[:cut])):
        for begin in range(0, shape[cut], length):
            yield Box(
                (*outer, begin, *(0 for _ in inner)),
                (*(1 for _ in outer), min(length, shape[cut] - begin), *inner),
            )


def count(a: memoryview, b: memoryview, dtype: str) -> ElementDifference:
    """Compare the bytes of two tensors of the same dtype and size, which differ somewhere."""
    item_bytes = DTYPES[dtype].item_bytes
    elements = len(a) // item_bytes
    numpy = _numpy()
    if numpy is None:
        return ElementDifference(elements=elements, different=None, largest=None)
    words = f"<u{min(item_bytes, 8)}"
    bits, other_bits = (numpy.frombuffer(data, words).reshape(elements, -1) for data in (a, b))
    differs = (bits != other_bits).any(axis=1)
    numbers = [_numbers(numpy, each[differs], dtype) for each in (bits, other_bits)]
    largest = None
    if numbers[0] is not None:
        with numpy.errstate(all="ignore"):
            largest = float(numpy.abs(numbers[0] - numbers[1]).max())
    return ElementDifference(elements=elements, different=int(differs.sum()), largest=largest)


def _numbers(numpy: Any, bits: Any, dtype: str) -> Any:
    """Return elements, given as their bits, as numbers of double precision; None if the dtype has none."""
    if dtype == "bfloat16":
        return (bits.astype("<u4") << 16).view("<f4").astype("f8")
    if dtype not in _NUMBERS:
        return None
    return bits.view(_NUMBERS[dtype]).astype("c16" if dtype.startswith("complex") else "f8")


def _numpy() -> Any:
    """Return NumPy; None if it is not installed."""
    try:
        return import_module("numpy")
    except ImportError:
        return None
