"""Reading files of `torch.save` without torch and without trusting them.

A torch file is a zip archive: `data.pkl` has the structure, pickled, and each storage of tensors is a separate member,
with the same bytes as in memory. A pickle is a program. Here it may make mappings, lists, tuples and plain values, and
call the functions of `_Machine`: each of these returns a description of a tensor and has no side effect. Any other
name in the pickle is rejected before it is called.
"""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Literal

from strata.checkpoint.snapshot.state import join
from strata.checkpoint.snapshot.tensors import DTYPES, StoredTensor, TensorSpec
from strata.errors import CheckpointError

MAX_PICKLE_BYTES: Final = 256 << 20
MAX_ORDER_BYTES: Final = 16
_STORAGES: Final = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "",
}
_FORMATS: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
_LOCAL_HEADER_BYTES: Final = 30

ReadInto = Callable[[memoryview], None]


def read_torch_file(path: Path) -> tuple[dict[str, Any], dict[str, TensorSpec]]:
    """Return the state in a torch file, and the specs of its tensors in the order in which they occur.

    `CheckpointError` for a file that is not complete, or that contains anything other than tensors, mappings, lists
    and plain values.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            pickled = next((name for name in members if name.endswith("data.pkl")), None)
            if pickled is None or members[pickled].file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(f"{path} is a zip file, and none that torch.save wrote")
            prefix = pickled.removesuffix("data.pkl")
            order = members.get(f"{prefix}byteorder")
            if order is not None and (order.file_size > MAX_ORDER_BYTES or archive.read(order) != b"little"):
                raise CheckpointError(f"{path} was not written on a little-endian machine")
            program = archive.read(pickled)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is no whole torch file: {error}") from error
    machine = _Machine(program, path, {n.removeprefix(prefix): i for n, i in members.items()})
    try:
        state = machine.load()
    except CheckpointError:
        raise
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(f"the structure of {path} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}, not a mapping", hint="save a state_dict()"
        )
    return state, dict(_tensors(state, "", set()))


def _tensors(value: object, key: str, seen: set[int]) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the names and specs of the tensors in `value`; each container is visited once."""
    if isinstance(value, StoredTensor):
        yield key, value.spec
    elif isinstance(value, dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _tensors(item, join(key, name), seen)


@dataclass(frozen=True, slots=True)
class _Storage:
    """One storage: the offset of its bytes in the file, and their number."""

    key: str
    dtype: str
    offset: int
    size_bytes: int


class _Machine(pickle.Unpickler):
    """The restricted machine that runs a torch file's pickle."""

    def __init__(self, program: bytes, path: Path, members: Mapping[str, zipfile.ZipInfo]) -> None:
        super().__init__(BytesIO(program))
        self._path = path
        self._members = members
        self._made: dict[object, StoredTensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch", "Size":
                return tuple
            case "torch._utils", "_rebuild_tensor_v2":
                return self._tensor
            case "torch._utils", "_rebuild_tensor_v3":
                return self._tensor_of_dtype
            case "torch._utils", "_rebuild_parameter":
                return self._parameter
            case (("torch" | "torch.storage"), _) if name in _STORAGES:
                return _STORAGES[name]
            case "torch", _ if name in DTYPES:
                return name
        raise CheckpointError(
            f"{self._path} holds a {module}.{name}, which is neither a tensor nor a plain value",
            hint="save a state_dict() of tensors, mappings, lists and plain values",
        )

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _location, _count = pid
        if kind != "storage" or storage_type not in _STORAGES.values():
            raise CheckpointError(f"{self._path} refers to a {kind!r}")
        info = self._members[f"data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self._path} is compressed", hint="torch.save does not compress")
        return _Storage(key, storage_type, self._data_offset(info), info.file_size)

    def _data_offset(self, info: zipfile.ZipInfo) -> int:
        """Return the offset of a member's bytes: after its header, name and extra field, whose lengths vary."""
        with self._path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER_BYTES)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return info.header_offset + _LOCAL_HEADER_BYTES + lengths

    def _parameter(self, data: Any, _requires_grad: Any, _hooks: Any) -> Any:
        return data

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
        return self._make(storage, storage.dtype, offset, tuple(shape), tuple(strides))

    def _tensor_of_dtype(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        _grad: Any,
        _hooks: Any,
        dtype: Any,
        *_: Any,
    ) -> StoredTensor:
        return self._make(storage, dtype, offset, tuple(shape), tuple(strides))

    def _make(
        self, storage: Any, dtype: str, offset: Any, shape: tuple[Any, ...], strides: tuple[Any, ...]
    ) -> StoredTensor:
        """Return the tensor; the same object for two names of the same memory."""
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or dtype not in DTYPES or len(shape) != len(strides):
            raise CheckpointError(f"{self._path} describes a tensor wrongly")
        if any(type(n) is not int or n < 0 for n in numbers):
            raise CheckpointError(f"{self._path} describes a tensor with {numbers}")
        spec = TensorSpec(kind="torch", dtype=dtype, shape=shape)
        item_bytes = DTYPES[dtype].item_bytes
        last = offset + sum(s * (n - 1) for s, n in zip(strides, shape, strict=True))
        if spec.size_bytes and (last + 1) * item_bytes > storage.size_bytes:
            raise CheckpointError(f"{self._path}: a tensor {spec} lies outside of its storage {storage.key}")
        found = (storage.key, dtype, offset, shape, strides)
        if found not in self._made:
            read = span_reader(self._path, storage.offset + offset * item_bytes)
            if spec.size_bytes and not _is_plain(shape, strides):
                read = _gathering(read, (last + 1 - offset) * item_bytes, item_bytes, shape, strides)
            self._made[found] = StoredTensor(spec=spec, read_into=read)
        return self._made[found]


def span_reader(path: Path, offset: int) -> ReadInto:
    """Return a function that fills a buffer with the file's bytes from `offset` on."""

    def read_into(buffer: memoryview) -> None:
        try:
            with path.open("rb", buffering=0) as file:
                done = 0
                while done < len(buffer):
                    count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
                    if count == 0:
                        raise CheckpointError(f"{path} ends after {offset + done} bytes: it was cut short")
                    done += count
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    return read_into


def _is_plain(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether the tensor is stored row after row, without gaps."""
    expected = 1
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        if count != 1 and stride != expected:
            return False
        expected *= count
    return True


def _gathering(
    read: ReadInto, span_bytes: int, item_bytes: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> ReadInto:
    """Return a reader of a tensor whose rows are not consecutive (a transposed one)."""
    if item_bytes not in _FORMATS:  # 16 bytes: pairs of 8
        shape, strides, item_bytes = (*shape, 2), (*(2 * s for s in strides), 1), 8

    def read_into(buffer: memoryview) -> None:
        span = memoryview(bytearray(span_bytes))
        read(span)
        _gather(span.cast(_FORMATS[item_bytes]), 0, shape, strides, buffer.cast(_FORMATS[item_bytes]))

    return read_into


def _gather(
    source: memoryview, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], into: memoryview
) -> None:
    count, stride = shape[0], strides[0]
    if len(shape) > 1:
        size = math.prod(shape[1:])
        for i in range(count):
            _gather(source, offset + i * stride, shape[1:], strides[1:], into[i * size : (i + 1) * size])
    elif stride:
        into[:] = source[offset : offset + stride * (count - 1) + 1 : stride]
    else:
        for i in range(count):
            into[i] = source[offset]
