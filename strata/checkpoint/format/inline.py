"""Values stored in the JSON text of a state's tree, not in an image: the plain values of torch's DCP.

    {"x": base64}  bytes         {"e": […]}  set            {"n": ["dtype", "float32"]}     torch.dtype
    {"i": base64}  BytesIO       {"g": […]}  frozenset      {"n": ["device", "cuda:0"]}     torch.device
    {"a": [kind, dtype, shape, base64]}  tensor or array    {"n": ["Size", [2, 3]]}         torch.Size

Nothing is pickled. A restored tensor is on the CPU.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import sys
from collections.abc import Callable
from typing import Any, Final

from strata.checkpoint.snapshot.tensors import DTYPES, TensorSpec, build, copy_out, spec_of
from strata.errors import CheckpointCorrupt, CheckpointError

Json = Any

MAX_BYTES: Final = 64 << 20
"""The largest bytes object or tensor in a tree's text: parsing takes several times the object's size in memory."""

_SETS: Final[dict[str, type]] = {"e": set, "g": frozenset}
KINDS: Final = frozenset({"x", "i", "a", "n", *_SETS})


def to_tree(key: str, value: object, add: Callable[[str, object], Json]) -> Json:
    """Return the tree of a value of the kinds above, else None; `add` returns the tree of a set's member.

    `CheckpointError`, naming the key, for a value that is too large.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return {"x": _text(key, bytes(value))}
    if type(value) is io.BytesIO:
        return {"i": _text(key, value.getvalue())}
    for kind, cls in _SETS.items():
        if type(value) is cls:
            members: Any = value
            return {kind: sorted((add(key, member) for member in members), key=json.dumps)}
    named = _name_of(value)
    if named is not None:
        return {"n": named}
    spec = spec_of(key, value)
    if spec is None:
        return None
    _check_size(key, spec.size_bytes)
    data = bytearray(spec.size_bytes)
    copy_out(value, spec, memoryview(data))
    return {"a": [spec.kind, spec.dtype, list(spec.shape), _text(key, data)]}


def value_of(kind: str, body: Json, value: Callable[[Json], Any]) -> Any:
    """Return the value that a tree of one of `KINDS` describes; `value` returns the value of a set's member.

    `CheckpointCorrupt` for a tree that `to_tree` does not produce.
    """
    try:
        if kind == "x":
            return _data(body)
        if kind == "i":
            return io.BytesIO(_data(body))
        if kind == "n":
            return _named(*body)
        if kind == "a":
            return _array(*body)
        return _SETS[kind](value(member) for member in body)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointCorrupt(f"a value of kind {kind!r} cannot be read: {error}") from error


def is_array(tree: Json) -> bool:
    """Return whether a tree is a tensor or an array stored in the text."""
    return isinstance(tree, dict) and "a" in tree


def _array(kind: str, dtype: str, shape: list[int], text: str) -> Any:
    if kind not in {"torch", "numpy"} or dtype not in DTYPES:
        raise ValueError(f"{kind} has no dtype {dtype!r} here")
    spec, data = TensorSpec(kind=kind, dtype=dtype, shape=tuple(shape)), _data(text)
    if len(data) != spec.size_bytes or min(spec.shape, default=0) < 0:
        raise ValueError(f"{spec} has {len(data)} bytes")
    return build("a tensor in a plain value", spec, memoryview(data))


def _name_of(value: object) -> Json:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, torch.Size):
        return ["Size", list(value)]
    return None


def _named(what: str, name: Json) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise CheckpointError(f"a torch.{what} was saved, and torch is not imported here")
    if what == "Size":
        return torch.Size(name)
    if what == "device":
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"torch has no device {name!r}") from error
    found = getattr(torch, name, None)
    if what == "dtype" and isinstance(found, torch.dtype):
        return found
    raise ValueError(f"torch has no {what} {name!r}")


def _check_size(key: str, size_bytes: int) -> None:
    if size_bytes > MAX_BYTES:
        raise CheckpointError(
            f"{key} has {size_bytes} bytes, and at most {MAX_BYTES} are saved within a plain value",
            hint="keep large tensors in dictionaries, or in lists of tensors",
        )


def _text(key: str, data: bytes | bytearray) -> str:
    _check_size(key, len(data))
    return base64.b64encode(data).decode()


def _data(text: Json) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
