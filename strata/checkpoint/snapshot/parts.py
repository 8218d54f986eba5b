"""The local parts of a distributed tensor: boxes (rectangular parts), and the processes that have the same boxes.

torch's DTensor (FSDP2, tensor parallelism) and ShardedTensor describe their parts. A tensor of another library needs
`__strata_parts__()`, which returns a `Distributed`, and `__strata_like__(parts)`: a tensor distributed like it.
No library is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strata.checkpoint.save.sharding import Box, Shape
from strata.checkpoint.snapshot.tensors import TensorSpec, spec_of
from strata.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPart:
    """A box of a tensor whose values this process has in `value`, a plain tensor of the box's shape.

    `replicas` processes have the same box; this process is number `replica` of them. The processes of a `group`
    share the writing of all boxes that they have in common.
    """

    box: Box
    value: Any
    replica: int = 0
    replicas: int = 1
    group: Hashable = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """A tensor of the whole training, and this process's parts of it (there may be no parts).

    `mesh` is this process's place, (index, size), in each named dimension of the partitioning.
    """

    spec: TensorSpec
    parts: tuple[LocalPart, ...]
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def is_distributed(value: object) -> bool:
    """Return whether `value` is a tensor of which other processes may have parts."""
    if hasattr(value, "__strata_parts__"):
        return not isinstance(value, type)
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.Tensor)
        and (hasattr(value, "device_mesh") or hasattr(value, "local_shards"))
    )


def distributed_of(key: str, value: Any) -> Distributed | None:
    """Return the spec and the local parts of `value`, or None if it is not distributed.

    `CheckpointError`, naming `key`, if the values are not known yet (a pending sum), or if the bytes in memory cannot
    be written unchanged.
    """
    if not is_distributed(value):
        return None
    if hasattr(value, "__strata_parts__"):
        found: Distributed = value.__strata_parts__()
        return found
    return _of_dtensor(key, value) if hasattr(value, "device_mesh") else _of_shards(key, value)


def is_in_place(value: object) -> bool:
    """Return whether a restore can write to the parts of `value`; if not, the restore builds a new value."""
    return not hasattr(value, "__strata_parts__")


def copy_of(value: Any) -> Any:
    """Return a copy of a tensor of torch or NumPy, in memory of its own."""
    return value.clone() if hasattr(value, "clone") else value.copy()


def like(example: Any, parts: Mapping[Box, Any]) -> Any:
    """Return a tensor distributed as `example` is, with these local parts."""
    if hasattr(example, "__strata_like__"):
        return example.__strata_like__(parts)
    module = sys.modules["torch.distributed.tensor"]
    # a process without a part still needs an empty local tensor
    local = next(iter(parts.values())) if parts else example.to_local().detach()
    if local.device != example.device:
        local = local.to(example.device)
    return module.DTensor.from_local(
        local,
        example.device_mesh,
        example.placements,
        run_check=False,
        shape=example.shape,
        stride=example.stride(),
    )


def _of_dtensor(key: str, value: Any) -> Distributed:
    if any(placement.is_partial() for placement in value.placements):
        raise CheckpointError(f"{key} is a DTensor with a Partial placement", hint="redistribute it first")
    spec, mesh = _spec(key, value), value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this process is not in the tensor's mesh
        return Distributed(spec=spec, parts=())
    replica, replicas, copied = 0, 1, []
    for dimension, placement in enumerate(value.placements):
        if placement.is_replicate():
            size = mesh.size(dimension)
            replica, replicas = replica * size + coordinate[dimension], replicas * size
            copied.append(dimension)
    local = value.to_local()
    shape, offsets = _place_in(value)
    if tuple(local.shape) != shape:
        raise CheckpointError(f"{key} has {list(local.shape)} here, and its mesh gives {list(shape)}")
    box = Box(offsets, shape)
    names = mesh.mesh_dim_names or ()
    named = {name: (coordinate[dimension], mesh.size(dimension)) for dimension, name in enumerate(names)}
    if not box.count and value.numel():
        return Distributed(spec=spec, parts=(), mesh=named)
    part = LocalPart(
        box=box,
        value=local,
        replica=replica,
        replicas=replicas,
        group=(tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape), tuple(copied)),
    )
    return Distributed(spec=spec, parts=(part,), mesh=named)


def _place_in(value: Any) -> tuple[Shape, Shape]:
    utils = sys.modules["torch.distributed.tensor._utils"]
    shape, offsets = utils.compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return tuple(int(n) for n in shape), tuple(int(n) for n in offsets)


def _of_shards(key: str, value: Any) -> Distributed:
    parts = [
        LocalPart(
            box=Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)),
            value=shard.tensor,
        )
        for shard in value.local_shards()
    ]
    return Distributed(spec=_spec(key, value), parts=tuple(part for part in parts if part.box.count))


def _spec(key: str, value: Any) -> TensorSpec:
    """Return the spec of the whole tensor; its parts have its dtype."""
    torch = sys.modules["torch"]
    plain = spec_of(key, torch.empty((0,), dtype=value.dtype))
    assert plain is not None, "a tensor"
    return TensorSpec(kind="torch", dtype=plain.dtype, shape=tuple(int(n) for n in value.shape))
