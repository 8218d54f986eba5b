"""Importing tensors of other programs' files, safetensors and torch's, as a state that can be saved.

Such a file is not trusted: its header is validated before any byte of data is read. The pickle of a torch file runs in
a restricted unpickler, which can make only mappings, lists, plain values and descriptions of tensors (`torch_file`).
Neither NumPy nor torch is needed. The save reads the data straight into the memory of the snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strata.checkpoint.convert.torch_file import read_torch_file, span_reader
from strata.checkpoint.format.tree_check import check_tree
from strata.checkpoint.snapshot.state import unflatten
from strata.checkpoint.snapshot.tensors import DTYPES, StoredTensor, TensorSpec
from strata.documents.parsing import HEADER, PLAIN, json_object
from strata.documents.reading import NotADocument, open_regular
from strata.errors import CheckpointError, ConfigError

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
STATE_KEY: Final = "strata.state"
"""The metadata key of the state's tree in an export, by which an import restores the same state."""
DEFAULT_KEY: Final = "model"

_BY_SAFETENSORS: Final = {d.safetensors: name for name, d in DTYPES.items() if not d.trailing}
_ZIP: Final = b"PK\x03\x04"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A state read from a file, and the names of its tensors in the order of the file."""

    state: dict[str, Any]
    tensors: Mapping[str, TensorSpec]

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.tensors.values())


def read_file(path: Path, *, key: str | None = None) -> Imported:
    """Return the contents of a safetensors file or a torch file as a state to save.

    Tensors at the top level of the file get the key `key` (default "model"). The top-level mappings of a torch file
    keep their own keys, unless `key` is given. A whole state that Strata exported becomes the same state again.
    `CheckpointError`, with the reason, for a file of another format, or an incomplete one.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            begin = file.read(8)
            size_bytes = file.seek(0, os.SEEK_END)
    except NotADocument as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="name a regular file") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if begin[:4] == _ZIP:
        return _of_torch(*read_torch_file(path), key)
    return _of_safetensors(path, begin, size_bytes, key)


def _of_torch(state: dict[str, Any], tensors: Mapping[str, TensorSpec], key: str | None) -> Imported:
    bare = any(isinstance(value, StoredTensor) for value in state.values())
    if key is not None or bare:
        state = {key or DEFAULT_KEY: state}
    return Imported(state=state, tensors=tensors)


# -- safetensors ------------------------------------------------------------------------------


def _of_safetensors(path: Path, begin: bytes, size_bytes: int, key: str | None) -> Imported:
    header_bytes = int.from_bytes(begin, "little")
    if len(begin) < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - 8):
        raise CheckpointError(
            f"{path} is neither a safetensors file nor a torch file, or it is cut short",
            hint="torch.save of torch 1.6 and later writes files that can be imported",
        )
    header = _header(path, header_bytes)
    metadata = header.pop("__metadata__", None) or {}
    data_begin = 8 + header_bytes
    tensors = {
        name: _stored(path, name, entry, data_begin, size_bytes - data_begin)
        for name, entry in header.items()
    }
    specs = {name: tensor.spec for name, tensor in tensors.items()}
    exported = metadata.get(STATE_KEY) if isinstance(metadata, dict) else None
    if exported is not None and key is None:
        return _as_exported(path, exported, tensors)
    return Imported(state={key or DEFAULT_KEY: dict(tensors)}, tensors=specs)


def _header(path: Path, header_bytes: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(8)
        text = file.read(header_bytes)
    try:
        return json_object(text, HEADER)
    except ValueError as error:
        raise CheckpointError(f"the header of {path} is no JSON: {error}") from error


def _stored(path: Path, name: str, entry: Any, data_begin: int, data_bytes: int) -> StoredTensor:
    """Return the tensor of one entry of the header; `CheckpointError` for an impossible one."""
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        start, end = entry["data_offsets"]
        counts = [start, end, *shape]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in counts):
            raise ValueError("a number in it is no size")
        if dtype not in _BY_SAFETENSORS:
            raise CheckpointError(f"{path}: tensor {name} has the dtype {dtype}, which cannot be saved")
        spec = TensorSpec(kind="torch", dtype=_BY_SAFETENSORS[dtype], shape=shape)
        if end - start != spec.size_bytes or end > data_bytes:
            raise ValueError(f"{spec} cannot lie in {start}..{end} of {data_bytes} bytes")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name} is described wrongly: {error}") from error
    return StoredTensor(spec=spec, read_into=span_reader(path, data_begin + start))


def _as_exported(path: Path, exported: str, tensors: Mapping[str, StoredTensor]) -> Imported:
    """Return the state whose tree an export contains, with the tensors' original kinds."""
    try:
        document = json_object(exported, PLAIN)
        check_tree(document["tree"])
        own = {name: _own_spec(tensors[name].spec, *kind) for name, kind in document["kinds"].items()}
        stored = {
            name: StoredTensor(spec=own.get(name, tensor.spec), read_into=tensor.read_into)
            for name, tensor in tensors.items()
        }
        state = unflatten(document["tree"], lambda name: stored[name])
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the tree of its state cannot be read: {error}",
            hint=f"--key {DEFAULT_KEY} imports its tensors without it",
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no mapping")
    return Imported(state=state, tensors={name: tensor.spec for name, tensor in stored.items()})


def _own_spec(found: TensorSpec, kind: str, dtype: str) -> TensorSpec:
    """Return the original spec of a tensor whose dtype safetensors lacks: 128-bit complex, opaque bytes."""
    trailing = DTYPES[dtype].trailing
    shape = found.shape[: len(found.shape) - len(trailing)]
    spec = TensorSpec(kind=kind, dtype=dtype, shape=shape)
    if kind not in {"torch", "numpy", "bytes"} or spec.size_bytes != found.size_bytes:
        raise ValueError(f"{spec} of kind {kind!r} is no {found}")
    return spec
