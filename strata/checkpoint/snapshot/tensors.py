"""Conversion between tensors of torch or NumPy and plain bytes with a shape and a dtype.

Neither library is imported here: a value can be a library's tensor only if that library is loaded already. A dtype
has the name that both libraries use (`float32`, `bfloat16`); in an image it has safetensors' name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from strata.checkpoint.format.digest import CHUNK_BYTES, Bytes
from strata.checkpoint.snapshot.memory import fill, memory_at
from strata.checkpoint.storage.pipeline import spread
from strata.errors import CheckpointError

COPY_THREADS: Final = 2
"""Two threads use all of the memory's bandwidth; one does not, and a third gains nothing."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype's storage in an image: if safetensors lacks the dtype, each value is `trailing` items of another."""

    safetensors: str
    item_bytes: int
    trailing: tuple[int, ...] = ()


DTYPES: Final = {
    "bool": Dtype("BOOL", 1),
    "uint8": Dtype("U8", 1),
    "int8": Dtype("I8", 1),
    "uint16": Dtype("U16", 2),
    "int16": Dtype("I16", 2),
    "uint32": Dtype("U32", 4),
    "int32": Dtype("I32", 4),
    "uint64": Dtype("U64", 8),
    "int64": Dtype("I64", 8),
    "float16": Dtype("F16", 2),
    "bfloat16": Dtype("BF16", 2),
    "float32": Dtype("F32", 4),
    "float64": Dtype("F64", 8),
    "float8_e4m3fn": Dtype("F8_E4M3", 1),
    "float8_e5m2": Dtype("F8_E5M2", 1),
    "float8_e8m0fnu": Dtype("F8_E8M0", 1),
    "complex64": Dtype("C64", 8),
    "complex128": Dtype("F64", 16, (2,)),
    "float8_e4m3fnuz": Dtype("U8", 1, (1,)),
    "float8_e5m2fnuz": Dtype("U8", 1, (1,)),
    "float4_e2m1fn_x2": Dtype("U8", 1, (1,)),
    "complex32": Dtype("F16", 4, (2,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The type and the shape of a tensor. `kind` is torch, numpy or bytes."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].item_bytes

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file; it can be saved like a tensor in memory, without torch or NumPy.

    `read_into` fills a buffer of the tensor's size with its bytes, in row-major order, little-endian.
    """

    spec: TensorSpec
    read_into: Callable[[memoryview], None]


def bytes_spec(size_bytes: int) -> TensorSpec:
    """Return the spec of opaque bytes: a one-dimensional U8 tensor."""
    return TensorSpec(kind="bytes", dtype="uint8", shape=(size_bytes,))


def spec_of(key: str, value: object) -> TensorSpec | None:
    """Return the spec of a tensor, or None for any other value.

    `CheckpointError`, naming `key`, for a tensor whose bytes in memory cannot be written unchanged.
    """
    if _is_torch(value):
        return _torch_spec(key, value)
    if _is_numpy(value):
        return _numpy_spec(key, value)
    if isinstance(value, StoredTensor):
        return value.spec
    return None


def identity(value: Any) -> object:
    """Return a key that is equal for two tensors if they are the same bytes at the same address."""
    place: tuple[object, ...]
    if isinstance(value, StoredTensor):
        return id(value)
    if _is_torch(value):
        place = (str(value.device), value.data_ptr(), value.stride(), value.is_conj(), value.is_neg())
    else:
        place = (value.__array_interface__["data"][0], value.strides)
    return place, str(value.dtype), tuple(value.shape)


def in_place(value: Any, spec: TensorSpec) -> memoryview | None:
    """Return the tensor's own memory, or None if its layout differs from the image's.

    The view does not keep the tensor alive.
    """
    if isinstance(value, StoredTensor):
        return None
    if spec.kind == "bytes":
        return memoryview(value).cast("B")
    if not spec.size_bytes:
        return memoryview(b"")
    if spec.kind == "torch":
        return memory_at(value.data_ptr(), spec.size_bytes) if _lies_plainly(value) else None
    if not value.flags.c_contiguous or value.dtype.newbyteorder("<") != value.dtype:
        return None
    return memory_at(value.__array_interface__["data"][0], spec.size_bytes)


def copy_out(value: Any, spec: TensorSpec, into: memoryview) -> None:
    """Copy the tensor's bytes, in row-major order, into a buffer of exactly their size."""
    if not spec.size_bytes:
        return
    if isinstance(value, StoredTensor):
        value.read_into(into)
    elif spec.kind == "bytes":
        into[:] = memoryview(value).cast("B")
    elif spec.kind == "torch":
        torch = sys.modules["torch"]
        with torch.no_grad():
            torch_view(torch, spec, into).copy_(value.detach())
    else:
        numpy = sys.modules["numpy"]
        numpy.copyto(_numpy_view(numpy, spec, into, value.dtype), value)


def copy_in(key: str, target: Any, spec: TensorSpec, data: memoryview) -> None:
    """Copy saved bytes into an existing tensor, whose shape and dtype must be the saved ones."""
    check_fits(key, target, spec)
    if not spec.size_bytes:
        return
    if _is_torch(target):
        torch = sys.modules["torch"]
        if _lies_plainly(target):
            # not `copy_`: on a busy host, torch's threads would spin for seconds while they wait for each other
            _fill(target.data_ptr(), data)
            torch.autograd.graph.increment_version(target)
            return
        try:
            with torch.no_grad():
                target.copy_(torch_view(torch, spec, data))
        except RuntimeError as error:  # an expanded tensor, whose elements share memory
            raise CheckpointError(f"{key} cannot be written: {error}") from error
    else:
        numpy = sys.modules["numpy"]
        numpy.copyto(target, _numpy_view(numpy, spec, data, target.dtype))


def _fill(address: int, data: memoryview) -> None:
    parts = [(address + at, data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    spread(len(parts), lambda number: fill(*parts[number]), threads=COPY_THREADS)


def class_text(value: object) -> str:
    """Return a description of a value's class for users: JAX's own class of arrays is not public."""
    return "a bare JAX array" if _is_of_jax(value) else f"a {type(value).__name__}"


def wrapping_hint(value: object) -> str | None:
    """Return the hint for a value that can be saved or restored only in a wrapper; None for any other value."""
    if not _is_of_jax(value):
        return None
    return "wrap the tree that holds it: Pytree(tree), from strata.integrations.jax import Pytree"


def _is_of_jax(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in {"jax", "jaxlib"}


def check_fits(key: str, target: object, spec: TensorSpec, *, written: bool = True) -> None:
    """Raise `CheckpointError`, naming `key`, unless the saved tensor can be copied into `target`.

    Dtype and shape must match; if `written`, `target` must also be writable.
    """
    here = spec_of(key, target)
    if here is None:
        raise CheckpointError(
            f"{key} was saved as a tensor {spec}, and is {class_text(target)} here",
            hint=wrapping_hint(target),
        )
    if (here.dtype, here.shape) != (spec.dtype, spec.shape):
        raise CheckpointError(f"{key} was saved as {spec}, and is {here} here")
    if written and _is_numpy(target) and not target.flags.writeable:  # type: ignore[attr-defined]  # an ndarray
        raise CheckpointError(f"{key} is a read-only array")


def build(key: str, spec: TensorSpec, data: memoryview, *, copied: bool = True) -> Any:
    """Return the saved tensor, as a tensor of the library from which it was saved.

    Unless `copied`, it may share `data`'s memory. A process without torch gets NumPy arrays, not torch's tensors.
    `CheckpointError`, naming `key`, if no loaded library knows the dtype.
    """
    if spec.kind == "bytes":
        return bytes(data)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and (spec.kind == "torch" or numpy is None):
        if not spec.size_bytes:
            return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        if not copied:
            return torch_view(torch, spec, data)
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
        _fill(tensor.data_ptr(), data)  # not `clone`: torch's threads would spin, as in `copy_in`
        return tensor
    if numpy is None:
        raise CheckpointError(f"{key} is a tensor, and neither numpy nor torch is imported here")
    try:
        dtype = numpy.dtype(spec.dtype)
    except TypeError:
        raise CheckpointError(
            f"{key} is {spec}, which NumPy does not know", hint="import torch or ml_dtypes first"
        ) from None
    array = _numpy_view(numpy, spec, data, dtype)
    return array.copy() if copied else array


# -- torch ------------------------------------------------------------------------------------


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _lies_plainly(value: Any) -> bool:
    """Return whether the bytes of a torch tensor are in host memory with the layout of an image."""
    return bool(
        value.device.type == "cpu" and value.is_contiguous() and not (value.is_conj() or value.is_neg())
    )


def _torch_spec(key: str, value: Any) -> TensorSpec:
    torch = sys.modules["torch"]
    dtype = str(value.dtype).removeprefix("torch.")
    if hasattr(value, "to_local") or hasattr(value, "__tensor_flatten__"):
        raise CheckpointError(
            f"{key} is a {type(value).__name__}, whose parts lie elsewhere",
            hint="save its local part, or the full tensor",
        )
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        raise CheckpointError(f"{key} is a tensor without plain memory ({value.layout}, {value.device})")
    if dtype not in DTYPES:
        raise CheckpointError(f"{key} has the dtype {value.dtype}, which cannot be saved")
    return TensorSpec(kind="torch", dtype=dtype, shape=tuple(int(n) for n in value.shape))


def torch_view(torch: Any, spec: TensorSpec, data: memoryview) -> Any:
    """Return bytes as the tensor that they encode, without a copy."""
    if data.readonly:
        # frombuffer warns about a read-only buffer; nothing here writes to it
        data = memoryview(bytearray(data))
    flat = torch.frombuffer(data, dtype=torch.uint8, count=spec.size_bytes)
    return flat.view(getattr(torch, spec.dtype)).view(spec.shape)


# -- NumPy ------------------------------------------------------------------------------------


def _is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _numpy_spec(key: str, value: Any) -> TensorSpec:
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.ma.MaskedArray):
        raise CheckpointError(f"{key} is a masked array", hint="save its data and its mask")
    if value.dtype.name not in DTYPES:
        raise CheckpointError(f"{key} is an array of {value.dtype}, which cannot be saved")
    return TensorSpec(kind="numpy", dtype=value.dtype.name, shape=tuple(value.shape))


def _numpy_view(numpy: Any, spec: TensorSpec, data: Bytes, dtype: Any) -> Any:
    """Return the bytes as an array. Images are little-endian; `newbyteorder` does nothing for types of one byte."""
    flat = numpy.frombuffer(data, dtype=numpy.uint8, count=spec.size_bytes)
    return flat.view(dtype.newbyteorder("<")).reshape(spec.shape)
