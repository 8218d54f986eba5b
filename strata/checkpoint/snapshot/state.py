"""A training state as a tree of plain values, with tensors beside it.

The tree is JSON. Values that JSON has are written as they are (None, booleans, integers, finite floats, text). Any
other value is a JSON object whose first key is the letter of its kind:

    {"t": name}  tensor          {"d": [[key, value]…], "c": class, "m": metadata}  mapping
    {"b": name}  opaque bytes    {"l": […]}  list       {"u": […]}  tuple
    {"f": text}  nan or inf      {"s": [dtype, hex]}  NumPy scalar

Values stored in the text itself, without an image beside it, have further kinds: see `inline`.

`name` is the tensor's name in the image: its path in the state, joined by dots. An object with `state_dict()` is
saved as the result of this call. A tensor that occurs twice in the state is written once. For a tensor distributed
over several processes (a DTensor, say), the tree has the name of the whole tensor, and the image has the local parts.
Nothing is pickled: a value of any other kind is an error that names its key.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from strata.checkpoint.format import inline
from strata.checkpoint.format.entries import Shard
from strata.checkpoint.save.replicated_tensors import Replica, Replication
from strata.checkpoint.snapshot.parts import Distributed, distributed_of
from strata.checkpoint.snapshot.tensors import (
    TensorSpec,
    bytes_spec,
    class_text,
    identity,
    spec_of,
    wrapping_hint,
)
from strata.errors import CheckpointCorrupt, CheckpointError

Json = Any
"""Any value that `json` reads and writes."""

RESERVED_NAMES: Final = frozenset({"__metadata__"})
"""Names that safetensors reserves."""

MAX_DEPTH: Final = 128
"""The greatest depth of nested containers: every parser accepts the resulting JSON, which is three times as deep."""

CLASSES: Final[dict[str, type]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
"""The supported mappings, by their names in a tree."""
_CLASSES: Final[dict[type, str]] = {cls: name for name, cls in CLASSES.items()}


@dataclass(slots=True)
class Flat:
    """Trees of one state, and the tensors that the trees name; the tensors are still in the trainer's memory.

    `shards` has, for each tensor that is a part, its place in the larger tensor. `replicas` has this process's number
    for each tensor that other processes have as well; for plain tensors the number comes from `replication`. `mesh`
    is this process's place, (index, size), in each dimension of the partitioning that the tensors describe.
    """

    tensors: dict[str, tuple[TensorSpec, Any]] = field(default_factory=dict)
    replication: Replication | None = None
    shards: dict[str, Shard] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    mesh: dict[str, tuple[int, int]] = field(default_factory=dict)
    _wholes: set[str] = field(default_factory=set)
    _seen: dict[object, str] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)

    def add(self, key: str, value: object) -> Json:
        """Return the tree of `value`, whose path is `key`; add its tensors.

        `CheckpointError`, naming the key, for a value that cannot be saved.
        """
        plain = _plain(key, value)
        if plain is not _OTHER:
            return plain
        distributed = distributed_of(key, value)
        if distributed is not None:
            return {"t": self._add_parts(key, distributed)}
        spec = spec_of(key, value)
        if spec is not None:
            kind = "b" if spec.kind == "bytes" else "t"  # bytes stored in a file
            return {kind: self._add_tensor(key, spec, value)}
        if isinstance(value, bytes | bytearray | memoryview):
            return {"b": self._add_bytes(key, value)}
        if id(value) in self._open:
            raise CheckpointError(f"{key} contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise CheckpointError(
                f"{key if len(key) <= 200 else f'{key[:200]}…'} lies {MAX_DEPTH} containers deep,"
                " and no deeper ones can be saved",
                hint="flatten the state: for example a list of parts instead of parts within parts",
            )
        self._open.add(id(value))
        try:
            return self._add_container(key, value)
        finally:
            self._open.discard(id(value))

    def _add_container(self, key: str, value: Any) -> Json:
        if type(value) in _CLASSES:
            return self._add_mapping(key, value)
        if type(value) is list:
            return {"l": [self.add(join(key, i), item) for i, item in enumerate(value)]}
        if type(value) is tuple:
            return {"u": [self.add(join(key, i), item) for i, item in enumerate(value)]}
        if has_state(value):
            if self.replication is not None:
                self.replication.look_at(key, value)
            return self.add(key, value.state_dict())
        wrapping = wrapping_hint(value)
        what = class_text(value) if wrapping else f"a {type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(
            f"{key or 'the state'} is {what}, which cannot be saved",
            hint=wrapping
            or "give it state_dict() and load_state_dict(), or turn it into plain values or bytes",
        )

    def _add_mapping(self, key: str, value: Mapping[Any, Any]) -> Json:
        items = []
        for name, item in value.items():
            plain = _plain(join(key, name), name)
            if plain is _OTHER:
                if not isinstance(name, tuple) or any(_plain(key, part) is _OTHER for part in name):
                    raise CheckpointError(f"a key of {key or 'the state'} is a {type(name).__name__}")
                plain = {"u": [_plain(key, part) for part in name]}
            items.append([plain, self.add(join(key, name), item)])
        tree = {"d": items, "c": _CLASSES[type(value)]}
        metadata = getattr(value, "_metadata", None)  # the versions of a torch module's parts
        if metadata is not None:
            tree["m"] = self.add(join(key, "_metadata"), metadata)
        return tree

    def _add_tensor(self, key: str, spec: TensorSpec, value: object) -> str:
        if not spec.size_bytes:
            return self._name(key, spec, value)
        same = identity(value)
        if same not in self._seen:
            self._seen[same] = self._shared(key, self._name(key, spec, value))
        return self._seen[same]

    def _shared(self, key: str, name: str) -> str:
        """Record whether other processes have the tensor `name` as well; return the name."""
        replica = self.replication.of(key) if self.replication is not None else None
        if replica is not None:
            self.replicas[name] = replica
        return name

    def _add_parts(self, key: str, distributed: Distributed) -> str:
        """Add the local parts of a tensor; return the name of the whole, which is the same on every rank."""
        name = self._free(key)
        self._wholes.add(name)
        self.mesh |= distributed.mesh
        alone = len(distributed.parts) == 1 and distributed.parts[0].replicas == 1
        for part in distributed.parts:
            # all processes with this part must give it the same name, whatever other parts each of them has
            own = name if alone else self._free(f"{name}@{','.join(map(str, part.box.offsets))}")
            spec = TensorSpec(kind=distributed.spec.kind, dtype=distributed.spec.dtype, shape=part.box.shape)
            self.tensors[own] = spec, part.value
            self.shards[own] = Shard(
                global_shape=distributed.spec.shape,
                offsets=part.box.offsets,
                tensor="" if own == name else name,
            )
            if part.replicas > 1:
                self.replicas[own] = Replica(number=part.replica, count=part.replicas, group=part.group)
        return name

    def _add_bytes(self, key: str, value: bytes | bytearray | memoryview) -> str:
        if isinstance(value, memoryview) and not value.c_contiguous:
            value = value.tobytes()
        size_bytes = memoryview(value).nbytes
        name = self._name(key or "bytes", bytes_spec(size_bytes), value)
        return self._shared(key, name) if size_bytes else name

    def _name(self, key: str, spec: TensorSpec, value: object) -> str:
        """Add `value` under its key, or a variation of it if two paths have the same text."""
        name = self._free(key)
        self.tensors[name] = (spec, value)
        return name

    def _free(self, key: str) -> str:
        key = key.encode("utf-8", "replace").decode()
        name, count = key, 1
        while name in self.tensors or name in self._wholes or name in RESERVED_NAMES or not name:
            count += 1
            name = f"{key}~{count}"
        return name


def has_state(value: object) -> bool:
    """Return whether `value` is an object with `state_dict` and `load_state_dict`."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def join(key: str, part: object) -> str:
    """Return the path of the item `part` of the value at `key`."""
    return f"{key}.{part}" if key else str(part)


def unflatten(tree: Json, leaf: Callable[[str], Any]) -> Any:
    """Return the value that `tree` describes, with `leaf(name)` for each tensor or bytes."""
    if not isinstance(tree, dict):
        return tree
    if "d" in tree:
        value = CLASSES[tree["c"]]({_key(k): unflatten(v, leaf) for k, v in tree["d"]})
        if "m" in tree:
            value._metadata = unflatten(tree["m"], leaf)
        return value
    ((kind, body),) = tree.items()
    if kind in {"t", "b"}:
        return leaf(body)
    if kind == "l":
        return [unflatten(item, leaf) for item in body]
    if kind == "u":
        return tuple(unflatten(item, leaf) for item in body)
    if kind == "f":
        return float(body)
    if kind == "s":
        return _numpy_scalar(*body)
    if kind in inline.KINDS:
        return inline.value_of(kind, body, lambda part: unflatten(part, leaf))
    raise CheckpointCorrupt(f"a manifest's tree has a value of kind {kind!r}")


def children(tree: Json) -> list[tuple[Any, Json]] | None:
    """Return the (key, tree) pairs of a container's tree, or None for a leaf."""
    if isinstance(tree, dict):
        if "d" in tree:
            return [(_key(k), v) for k, v in tree["d"]]
        for kind in ("l", "u"):
            if kind in tree:
                return list(enumerate(tree[kind]))
    return None


def leaves(tree: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield (path, tree) for every value of a state that contains no other value."""
    parts = children(tree)
    if parts is None:
        yield path, tree
    else:
        for name, part in parts:
            yield from leaves(part, join(path, name))


def named_by(leaf: Json) -> str | None:
    """Return the name of a leaf's tensor or opaque bytes; None for any other leaf."""
    return leaf.get("t", leaf.get("b")) if isinstance(leaf, dict) else None


def _key(tree: Json) -> Any:
    return unflatten(tree, lambda name: name)


# -- plain values -----------------------------------------------------------------------------

_OTHER: Final = object()
_MAX_INT_BITS: Final = 8192  # below Python's limit for parsing integers: 4,300 digits


def _plain(key: str, value: object) -> Json:
    """Return the tree of a value that needs no tensor and contains no other value, or `_OTHER`.

    For an instance of a subclass (an IntEnum), return `_OTHER`: a restore would give the value another class.
    """
    if value is None or type(value) in {bool, str}:
        return value
    if type(value) is int:
        return value if value.bit_length() <= _MAX_INT_BITS else _OTHER
    if type(value) is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        dtype = cast("Any", value).dtype
        if dtype.kind not in "biufc":
            raise CheckpointError(f"{key} is a NumPy scalar of {dtype}, which cannot be saved")
        little = numpy.asarray(value, dtype=dtype.newbyteorder("<"))
        return {"s": [dtype.name, little.tobytes().hex()]}
    return _OTHER


def _numpy_scalar(dtype: str, text: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        raise CheckpointError(f"a NumPy scalar of {dtype} was saved, and numpy is not imported here")
    try:
        found = numpy.frombuffer(bytes.fromhex(text), dtype=numpy.dtype(dtype).newbyteorder("<"))
        return found[0].astype(dtype)
    except (ValueError, TypeError, IndexError) as error:
        raise CheckpointCorrupt(f"a NumPy scalar of {dtype[:50]!r} cannot be read: {error}") from error
