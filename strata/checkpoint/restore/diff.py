"""The differences between two checkpoints, by their manifests alone: no tensor is read.

Tensors of the same name are compared by dtype, shape and the digests of their chunks. So for two tensors of the same
shape, the comparison finds which chunks of 8 MiB differ. Plain values are compared path by path.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.format.manifest import RankManifest, TensorEntry
from strata.checkpoint.snapshot.state import Json, leaves, named_by

_SCALARS: Final = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTensor:
    """A tensor in both checkpoints. `chunks` is None if the shapes or dtypes differ."""

    name: str
    before: str
    after: str
    chunks: int | None
    of_chunks: int
    changed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedValue:
    """A plain value that differs, before and after; None if that checkpoint does not have the value."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The differences between one rank's parts of two checkpoints."""

    removed: tuple[str, ...]
    added: tuple[str, ...]
    changed: tuple[ChangedTensor, ...]
    same: int
    values: tuple[ChangedValue, ...]
    changed_bytes: int
    total_bytes: int


def compare(before: RankManifest, after: RankManifest) -> Difference:
    """Return the changes from `before` to `after`; names are in the order of the image."""
    shared = [name for name in after.tensors if name in before.tensors]
    pairs = [(name, before.tensors[name], after.tensors[name]) for name in shared]
    changed = tuple(_changed(*pair) for pair in pairs if _content(pair[1]) != _content(pair[2]))
    added = tuple(name for name in after.tensors if name not in before.tensors)
    return Difference(
        removed=tuple(name for name in before.tensors if name not in after.tensors),
        added=added,
        changed=changed,
        same=len(shared) - len(changed),
        values=tuple(_changed_values(before, after)),
        changed_bytes=sum(c.changed_bytes for c in changed)
        + sum(after.tensors[name].spec.size_bytes for name in added),
        total_bytes=sum(entry.spec.size_bytes for entry in after.tensors.values()),
    )


def _content(entry: TensorEntry) -> object:
    """Return a key that is equal for equal tensors, no matter from which library they were saved."""
    return entry.spec.dtype, entry.spec.shape, entry.chunks


def _changed(name: str, before: TensorEntry, after: TensorEntry) -> ChangedTensor:
    comparable = (before.spec.dtype, before.spec.shape) == (after.spec.dtype, after.spec.shape)
    number, changed_bytes = None, after.spec.size_bytes
    if comparable:
        differ = [
            i for i, pair in enumerate(zip(before.chunks, after.chunks, strict=True)) if pair[0] != pair[1]
        ]
        number, changed_bytes = len(differ), sum(after.chunk_bytes(i) for i in differ)
    return ChangedTensor(
        name=name,
        before=str(before.spec),
        after=str(after.spec),
        chunks=number,
        of_chunks=len(after.chunks),
        changed_bytes=changed_bytes,
    )


def _changed_values(before: RankManifest, after: RankManifest) -> Iterator[ChangedValue]:
    old, new = dict(plain_values(before.tree)), dict(plain_values(after.tree))
    for path in {**old, **new}:
        if old.get(path) != new.get(path):
            yield ChangedValue(path=path, before=old.get(path), after=new.get(path))


def plain_values(tree: Json) -> Iterator[tuple[str, str]]:
    """Yield (path, value as text) for every leaf of a state that is not a tensor."""
    for path, leaf in leaves(tree):
        if named_by(leaf) is None:
            yield path, text_of(leaf)


def text_of(tree: Json) -> str:
    """Return a leaf that is not a tensor as people write it."""
    if not isinstance(tree, dict):
        return repr(tree)
    ((kind, body),) = tree.items()
    return _scalar(*body) if kind == "s" else str(body)


def _scalar(dtype: str, text: str) -> str:
    """Return a NumPy scalar as people write it, without NumPy."""
    if dtype not in _SCALARS:
        return f"{dtype} {text}"
    (value,) = struct.unpack(f"<{_SCALARS[dtype]}", bytes.fromhex(text))
    return repr(value)
