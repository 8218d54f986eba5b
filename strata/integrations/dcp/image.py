"""What DCP's planner gave one rank, as an image and its manifest."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from strata.checkpoint.catalog import CheckpointMetadata
from strata.checkpoint.composing import identity_of
from strata.checkpoint.digest import chunks, digest
from strata.checkpoint.entries import Shard, TensorEntry
from strata.checkpoint.image import lay_out
from strata.checkpoint.manifest import RankManifest, image_name
from strata.checkpoint.memory import Arena
from strata.checkpoint.pipeline import write_image
from strata.checkpoint.sink import Storage
from strata.checkpoint.state import Json
from strata.checkpoint.tensors import TensorSpec, bytes_spec, copy_out, in_place, spec_of
from strata.errors import CheckpointError


@dataclass(slots=True)
class Staging:
    """Memory, used again by each save, for tensors that do not lie as they are written."""

    arena: Arena = field(default_factory=Arena)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """A box of a tensor, or bytes, and what it is a part of."""

    spec: TensorSpec
    shard: Shard
    value: Any


def write_part(
    storage: Storage,
    folder: str,
    given: Sequence[tuple[WriteItem, Any]],
    *,
    record: CheckpointMetadata,
    rank: int,
    tree: Json,
    staging: Staging,
) -> RankManifest:
    """Write the image of these items; return its manifest once the image is durable."""
    values: dict[str, _Value] = {}
    for item, data in given:
        name, count = item.index.fqn, 1
        while name in values or not name or name == "__metadata__":
            count += 1
            name = f"{item.index.fqn}~{count}"
        values[name] = _value(item, data, tensor="" if name == item.index.fqn else item.index.fqn)
    layout = lay_out({name: value.spec for name, value in values.items()})
    views = _stage({name: values[name] for name in layout.places}, staging)
    sink = storage.sink(f"{folder}/{image_name(rank)}")
    try:
        sink.begin(layout.size_bytes)
        pieces = [memoryview(layout.header), *views.values()]
        found = iter(write_image(sink, pieces, [c for view in views.values() for c in chunks(view)]))
        sink.finish()
    finally:
        sink.abort()
    return RankManifest(
        identity=identity_of(record),
        rank=rank,
        image=image_name(rank),
        image_bytes=layout.size_bytes,
        header_bytes=len(layout.header),
        header_digest=digest(layout.header),
        tensors={
            name: TensorEntry(
                spec=place.spec,
                start=place.start,
                end=place.end,
                chunks=tuple(itertools.islice(found, len(list(chunks(views[name]))))),
                shard=values[name].shard,
            )
            for name, place in layout.places.items()
        },
        tree=tree,
        rng=None,
    )


def _value(item: WriteItem, data: Any, *, tensor: str) -> _Value:
    if item.type == WriteItemType.BYTE_IO:
        content = data.getbuffer() if isinstance(data, io.BytesIO) else memoryview(data)
        spec = bytes_spec(content.nbytes)
        return _Value(
            spec=spec, shard=Shard(global_shape=spec.shape, offsets=(0,), tensor=tensor), value=content
        )
    assert item.tensor_data is not None, "a tensor's item"
    local, chunk = data.detach(), item.tensor_data.chunk
    found = spec_of(item.index.fqn, local)
    assert found is not None, "the planner gives a tensor"
    if found.shape != tuple(chunk.sizes):
        raise CheckpointError(
            f"{item.index.fqn} has {list(found.shape)} here, and DCP's plan says {list(chunk.sizes)}"
        )
    shard = Shard(global_shape=tuple(item.tensor_data.size), offsets=tuple(chunk.offsets), tensor=tensor)
    return _Value(spec=found, shard=shard, value=local)


def _stage(values: dict[str, _Value], staging: Staging) -> dict[str, memoryview]:
    """Return the bytes of each value: where they lie, else copied out.

    DCP holds on to the state until the save has ended (in the background it is a copy already), so
    what lies in plain memory is written from there.
    """
    views = {name: in_place(value.value, value.spec) for name, value in values.items()}
    size_bytes = sum(values[name].spec.size_bytes for name, view in views.items() if view is None)
    memory, begin = staging.arena.take(size_bytes), 0
    found: dict[str, memoryview] = {}
    for name, value in values.items():
        view = views[name]
        if view is None:
            end = begin + value.spec.size_bytes
            view = memory[begin:end]
            copy_out(value.value, value.spec, view)
            begin = end
        found[name] = view
    return found
