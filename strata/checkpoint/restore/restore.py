"""Restoring a saved state into the trainer's objects.

Before any object is changed, all keys, kinds, shapes and dtypes are checked. Then tensors are copied in place, objects
receive their part by `load_state_dict`, and plain values are replaced in the dictionaries and lists that contain them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from strata.checkpoint.format.inline import is_array
from strata.checkpoint.save.sharding import Box
from strata.checkpoint.snapshot.parts import copy_of, distributed_of, is_distributed, is_in_place, like
from strata.checkpoint.snapshot.state import Json, children, has_state, join, unflatten
from strata.checkpoint.snapshot.tensors import (
    TensorSpec,
    build,
    check_fits,
    class_text,
    copy_in,
    spec_of,
    wrapping_hint,
)
from strata.errors import CheckpointError

_OF_DEVICE: Final = ("CUDA", "NCCL", "HIP error", "out of memory", "an exception occurred")
_KINDS: Final = {
    "t": "a tensor",
    "a": "a tensor",
    "b": "bytes",
    "x": "bytes",
    "l": "a list",
    "u": "a tuple",
    "e": "a set",
    "g": "a set",
    "f": "a number",
    "s": "a number",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One rank's part of a checkpoint, read and verified.

    `examples` has, for each tensor to be distributed over several processes, a tensor with the same distribution. Of
    the tensors in `boxes`, only this process's boxes were read.
    """

    tree: Json
    rng: Json
    specs: Mapping[str, TensorSpec]
    data: Mapping[str, memoryview]
    boxes: Mapping[str, Mapping[Box, memoryview]] = field(default_factory=dict)
    examples: Mapping[str, Any] = field(default_factory=dict)

    def value(self, tree: Json, *, copied: bool = True) -> Any:
        """Return the value that `tree`, a part of this checkpoint's tree, describes."""
        return unflatten(tree, lambda name: self._tensor(name, copied=copied))

    def _tensor(self, name: str, *, copied: bool) -> Any:
        spec, example = self.specs[name], self.examples.get(name)
        if example is None:
            return build(name, spec, self.data[name], copied=copied)
        if name in self.boxes:
            parts = {
                box: build(name, replace(spec, shape=box.shape), data, copied=copied)
                for box, data in self.boxes[name].items()
            }
        else:
            whole, here = build(name, spec, self.data[name], copied=False), distributed_of(name, example)
            assert here is not None, "it lies on several processes"
            parts = {part.box: copy_of(whole[part.box.slices()]) for part in here.parts}
        return like(example, parts)


def restore_into(saved: Saved, state: MutableMapping[str, Any], *others: Saved) -> None:
    """Restore each key of `state` from the first checkpoint that has it.

    A checkpoint may have more keys than `state`. If a value does not fit, raise `CheckpointError`, naming the key, and
    change nothing.
    """
    parts: dict[Any, tuple[Saved, Json]] = {}
    for source in reversed((saved, *others)):
        parts |= {key: (source, tree) for key, tree in _parts("the state", source.tree).items()}
    for key, target in state.items():
        if key not in parts:
            raise CheckpointError(
                f"{key} is not in the checkpoint, which holds {sorted(map(str, parts))}",
                hint="restore() takes several steps, too: each key comes from the first that holds it",
            )
        source, tree = parts[key]
        _check(source, str(key), target, tree)
    for key in list(state):
        source, tree = parts[key]
        state[key] = _merge(source, str(key), state[key], tree)


def _parts(key: str, tree: Json) -> dict[Any, Json]:
    if not (isinstance(tree, dict) and "d" in tree):
        raise CheckpointError(f"{key} was saved as {_kind(tree)}, and is a mapping here")
    return dict(children(tree) or ())


# -- 1. check that everything fits ------------------------------------------------------------


def _check(saved: Saved, key: str, target: Any, tree: Json) -> None:
    if target is None:
        return
    if _is_tensor(tree):
        _check_tensor(key, target, saved.specs[tree["t"]])
    elif spec_of(key, target) is not None and not is_array(tree):
        raise CheckpointError(f"{key} was saved as {_kind(tree)}, and is a tensor here")
    elif isinstance(target, MutableMapping):
        parts = _parts(key, tree)
        for name, item in target.items():
            if name not in parts:
                raise CheckpointError(f"{join(key, name)} is not in the checkpoint")
            _check(saved, join(key, name), item, parts[name])
    elif isinstance(target, list | tuple):
        _check_sequence(saved, key, target, tree)
    elif has_state(target):
        _check_state(saved, key, target.state_dict(), tree)
    elif children(tree) is not None or _is_bytes(tree) != isinstance(target, bytes | bytearray):
        pickled = "load values that torch's own planner pickled through DCP, with that planner"
        raise CheckpointError(
            f"{key} was saved as {_kind(tree)}, and is {class_text(target)} here",
            hint=pickled if _is_bytes(tree) else wrapping_hint(target),
        )


def _check_sequence(saved: Saved, key: str, target: list[Any] | tuple[Any, ...], tree: Json) -> None:
    if _kind(tree) not in {"a list", "a tuple"}:
        raise CheckpointError(f"{key} was saved as {_kind(tree)}, and is a {type(target).__name__} here")
    items = children(tree) or []
    if len(items) == len(target):
        for (index, item), here in zip(items, target, strict=True):
            _check(saved, join(key, index), here, item)


def _check_state(saved: Saved, key: str, here: Any, tree: Json) -> None:
    """Compare an object's existing tensors with the saved ones; `load_state_dict` checks the rest."""
    if is_distributed(here) or spec_of(key, here) is not None:
        if not _is_tensor(tree):
            raise CheckpointError(f"{key} was saved as {_kind(tree)}, and is a tensor here")
        _check_tensor(key, here, saved.specs[tree["t"]], written=False)
        return
    parts = dict(children(tree) or ())
    items: Any = ()
    if isinstance(here, Mapping):
        items = here.items()
    elif isinstance(here, list | tuple):
        items = enumerate(here)
    for name, item in items:
        if name in parts:
            _check_state(saved, join(key, name), item, parts[name])


def _check_tensor(key: str, target: Any, spec: TensorSpec, *, written: bool = True) -> None:
    here = distributed_of(key, target)
    if here is None:
        check_fits(key, target, spec, written=written)
    elif (here.spec.dtype, here.spec.shape) != (spec.dtype, spec.shape):
        raise CheckpointError(f"{key} was saved as {spec}, and is {here.spec} here")


# -- 2. change it -----------------------------------------------------------------------------


def _merge(saved: Saved, key: str, target: Any, tree: Json) -> Any:
    """Return the new value under `key`: `target`, changed in place if possible."""
    if target is None:
        return saved.value(tree)
    if _is_tensor(tree):
        return _merge_tensor(saved, key, target, tree["t"])
    if isinstance(target, MutableMapping):
        for name, item in children(tree) or ():
            target[name] = _merge(saved, join(key, name), target.get(name), item)
        return target
    if isinstance(target, list | tuple):
        items = children(tree) or []
        before = target if len(items) == len(target) else [None] * len(items)
        after = [_merge(saved, join(key, i), b, t) for (i, t), b in zip(items, before, strict=True)]
        if isinstance(target, tuple):
            return tuple(after)
        target[:] = after
        return target
    if has_state(target):
        _load(key, target, saved.value(tree, copied=not _copies(target)))
        return target
    return saved.value(tree)


def _merge_tensor(saved: Saved, key: str, target: Any, name: str) -> Any:
    spec, here = saved.specs[name], distributed_of(key, target)
    if here is None:
        copy_in(key, target, spec, saved.data[name])
        return target
    if not is_in_place(target):
        return saved.value({"t": name})
    boxes = saved.boxes.get(name)
    for part in here.parts:
        own = replace(spec, shape=part.box.shape)
        if boxes is not None:
            copy_in(key, part.value, own, boxes[part.box])
        else:  # the whole tensor was read, because another place of the state needs it whole
            whole = build(key, spec, saved.data[name], copied=False)
            part.value.copy_(whole[part.box.slices()])
    return target


def _copies(target: object) -> bool:
    """Return whether loading `target` copies tensors: a torch module does; other objects may keep the tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.nn.Module)


def _load(key: str, target: Any, state: Any) -> None:
    try:
        target.load_state_dict(state)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        refused = CheckpointError(f"{key} ({type(target).__name__}) refuses its state: {error}")
        refused.lasting = not _is_of_device(error)
        raise refused from error


def _is_of_device(error: Exception) -> bool:
    """Return whether a device failed or is out of memory, so that another try may succeed.

    torch then raises subclasses of RuntimeError; a module's `load_state_dict` quotes their text in its own error.
    """
    if not isinstance(error, RuntimeError):
        return False
    return type(error) is not RuntimeError or any(word in str(error) for word in _OF_DEVICE)


def _is_tensor(tree: Json) -> bool:
    return isinstance(tree, dict) and "t" in tree


def _is_bytes(tree: Json) -> bool:
    return isinstance(tree, dict) and ("b" in tree or "x" in tree)


def _kind(tree: Json) -> str:
    if not isinstance(tree, dict):
        return f"a plain {type(tree).__name__}"
    if "d" in tree:
        return "a mapping"
    return next((word for kind, word in _KINDS.items() if kind in tree), "a plain value")
