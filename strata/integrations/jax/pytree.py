"""`Pytree`: wraps a JAX pytree as an object with `state_dict` and `load_state_dict`.

Leaves are named by their paths. An array on one device is saved as a NumPy array. Each process saves the blocks
of an array that are on its devices; processes that have the same block divide the writing of this block. A
restored array gets the sharding of the array in the tree, whatever devices the saved array was on. No array is
ever gathered in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from strata.checkpoint.save.sharding import Box, Shape
from strata.checkpoint.snapshot.parts import Distributed, LocalPart
from strata.checkpoint.snapshot.tensors import DTYPES, TensorSpec
from strata.errors import CheckpointError


class Pytree:
    """Holds a pytree. `load_state_dict`, and so a restore, replaces `tree`."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves by their paths, in the form that a checkpoint saves."""
        found: dict[str, Any] = {}
        for path, leaf in tree_util.tree_flatten_with_path(self.tree)[0]:
            key = _key(path)
            if key in found:
                raise CheckpointError(f"two leaves of the pytree have the path {key}")
            found[key] = _saved(leaf, key)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the tree by one of the same structure with the leaves of `state`."""
        leaves, structure = tree_util.tree_flatten_with_path(self.tree)
        missing = [key for path, _ in leaves if (key := _key(path)) not in state]
        if missing:
            raise KeyError(f"the checkpoint has no leaf {missing[0]}")
        self.tree = tree_util.tree_unflatten(
            structure, [_restored(leaf, state[_key(path)]) for path, leaf in leaves]
        )


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArray:
    """An array on several devices, of which this process may have some."""

    array: jax.Array
    path: str

    def __strata_parts__(self) -> Distributed:
        array, here = self.array, jax.process_index()
        name = np.dtype(array.dtype).name
        if name not in DTYPES:
            raise CheckpointError(f"{self.path} of a Pytree is an array of {name}, which cannot be saved")
        holders: dict[Box, list[int]] = {}
        devices: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
        for device, index in devices.items():
            processes = holders.setdefault(_box(index, array.shape), [])
            if device.process_index not in processes:
                processes.append(device.process_index)
        parts: dict[Box, LocalPart] = {}
        for shard in array.addressable_shards:
            box = _box(shard.index, array.shape)
            if box in parts:
                continue
            processes = sorted(holders[box])
            parts[box] = LocalPart(
                box=box,
                value=np.asarray(shard.data),
                replica=processes.index(here),
                replicas=len(processes),
                group=tuple(processes),
            )
        spec = TensorSpec(kind="numpy", dtype=name, shape=tuple(array.shape))
        return Distributed(spec=spec, parts=tuple(parts.values()))

    def __strata_like__(self, parts: Mapping[Box, Any]) -> jax.Array:
        array = self.array
        pieces = [
            jax.device_put(parts[_box(shard.index, array.shape)], shard.device)
            for shard in array.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def _saved(leaf: Any, path: str) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _saved(jax.random.key_data(leaf), path)
    if leaf.is_fully_addressable and len(leaf.sharding.device_set) == 1:
        return np.asarray(leaf)
    return DeviceArray(leaf, path)


def _restored(leaf: Any, value: Any) -> Any:
    """Return the new leaf in the place of `leaf`, made of the restored `value`."""
    if not isinstance(leaf, jax.Array):
        return value
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _restored(jax.random.key_data(leaf), value)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if isinstance(value, jax.Array):
        return value
    # a copy: on a CPU, JAX may keep using the memory of its argument
    return jax.device_put(np.array(value), leaf.sharding)


def _box(index: tuple[slice, ...], shape: Shape) -> Box:
    starts = tuple(part.start or 0 for part in index)
    ends = tuple(n if part.stop is None else part.stop for part, n in zip(index, shape, strict=True))
    return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _key(path: tuple[Any, ...]) -> str:
    return ".".join(str(_part(each)) for each in path)


def _part(entry: Any) -> Any:
    """Return the key, attribute name or index of a path's entry."""
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return entry
