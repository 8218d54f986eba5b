"""Which tensors of the whole training a state needs, and which of them it needs only in parts.

A restore walks through the state to be filled and the checkpoint's tree in parallel. If a tensor is distributed in the
state, only its local boxes are read; any other tensor is read whole. An optimizer that has made no step yet has no
tensors: then a saved tensor with the shape of a parameter is distributed like that parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from strata.checkpoint.snapshot.parts import distributed_of, is_distributed
from strata.checkpoint.snapshot.state import Json, children, has_state
from strata.checkpoint.snapshot.tensors import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unborn:
    """A placeholder for the state that an optimizer will have for a parameter after its first step."""

    parameter: Any


def wanted(tree: Json, state: Any, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return the tensors of `specs` that the state needs.

    Each has an example (a tensor that is distributed in the same way), or None if the tensor is needed whole.
    """
    found: dict[str, Any] = {}
    for name, target in _walk(tree, state, outermost=True):
        if name not in specs:
            continue
        here = distributed_of(name, target)
        if here is not None and here.spec.shape == specs[name].shape:
            found.setdefault(name, target)
        else:
            found[name] = None
    return found


def _walk(tree: Json, target: Any, *, outermost: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (name, the target's value at the same place) for each tensor or opaque bytes of the tree."""
    if isinstance(tree, dict) and "b" in tree:
        yield tree["b"], None
        return
    if isinstance(tree, dict) and "t" in tree:
        yield tree["t"], target.parameter if isinstance(target, _Unborn) else target
        return
    if not isinstance(target, Mapping | list | tuple) and has_state(target):
        target = example_of(target)
    for key, part in children(tree) or ():
        if isinstance(target, _Unborn):
            yield from _walk(part, target)
        elif isinstance(target, Mapping):
            if key in target or not outermost:
                yield from _walk(part, target.get(key))
        elif isinstance(target, list | tuple) and isinstance(key, int) and key < len(target):
            yield from _walk(part, target[key])
        elif not outermost:
            yield from _walk(part, None)


def example_of(target: Any) -> Any:
    """Return an object's current state; for an optimizer, with placeholders for the state it will have."""
    state = target.state_dict()
    groups = getattr(target, "param_groups", None)
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return state
    parameters = [parameter for group in groups for parameter in group.get("params", ())]
    if not any(is_distributed(parameter) for parameter in parameters):
        return state
    known = state.get("state")
    if not isinstance(known, Mapping):
        return state
    unborn = {number: _Unborn(parameter=each) for number, each in enumerate(parameters)}
    return {**state, "state": {**unborn, **known}}
