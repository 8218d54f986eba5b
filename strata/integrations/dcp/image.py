"""Turns the items that DCP's planner assigned to one rank into the snapshot that a save writes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from strata.checkpoint.format.entries import Shard
from strata.checkpoint.snapshot.snapshot import Arena, Snapshot, look_at
from strata.checkpoint.snapshot.state import RESERVED_NAMES, Flat, Json
from strata.checkpoint.snapshot.tensors import TensorSpec, bytes_spec, spec_of
from strata.errors import CheckpointError


def snapshot_of(given: Iterable[tuple[WriteItem, Any]], *, tree: Json, arena: Arena) -> Snapshot:
    """Return the snapshot of these items.

    DCP keeps the state (for a background save, a copy of the state) until the save has ended. So values in
    plain memory are written directly, and only other values are copied to the arena first.
    """
    flat = Flat()
    for item, data in given:
        name, count = item.index.fqn, 1
        while name in flat.tensors or not name or name in RESERVED_NAMES:
            count += 1
            name = f"{item.index.fqn}~{count}"
        spec, value, shape, offsets = _value(item, data)
        flat.tensors[name] = spec, value
        tensor = "" if name == item.index.fqn else item.index.fqn
        flat.shards[name] = Shard(global_shape=shape, offsets=offsets, tensor=tensor)
    return look_at(flat, tree=tree, rng=None, arena=arena)


def _value(item: WriteItem, data: Any) -> tuple[TensorSpec, Any, tuple[int, ...], tuple[int, ...]]:
    """Return the spec and value to save, the shape of the global tensor, and the value's offsets in it."""
    if item.type == WriteItemType.BYTE_IO:
        content = data.getbuffer() if isinstance(data, io.BytesIO) else memoryview(data)
        spec = bytes_spec(content.nbytes)
        return spec, content, spec.shape, (0,)
    assert item.tensor_data is not None, "a tensor's item"
    local, chunk = data.detach(), item.tensor_data.chunk
    found = spec_of(item.index.fqn, local)
    assert found is not None, "the planner gives a tensor"
    if found.shape != tuple(chunk.sizes):
        raise CheckpointError(
            f"{item.index.fqn} has {list(found.shape)} here, and DCP's plan gives {list(chunk.sizes)}"
        )
    return found, local, tuple(item.tensor_data.size), tuple(chunk.offsets)
