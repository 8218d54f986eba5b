"""Writing one rank's image: all of its snapshot, or what has changed since the base.

A whole one is hashed while it is written, as it lies in memory. Of an Incremental the digests are
known, because it was compared by them, and the chunks to be written are put together from where
they lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from strata.checkpoint.bases import Plan
from strata.checkpoint.digest import chunks
from strata.checkpoint.entries import ImageRef, TensorEntry
from strata.checkpoint.image import Layout, lay_out
from strata.checkpoint.incremental import entries, image_pieces
from strata.checkpoint.pipeline import OnBlock, write_image
from strata.checkpoint.sink import Storage
from strata.checkpoint.snapshot import Snapshot
from strata.checkpoint.tensors import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """An image that is durable: how it is laid out, and where every chunk of the state lies."""

    layout: Layout
    tensors: Mapping[str, TensorEntry]
    files: tuple[ImageRef, ...] = ()


def layout_of(snapshot: Snapshot, plan: Plan) -> Layout:
    """Return the image that the plan makes of the snapshot."""
    if plan.delta is None:
        return snapshot.layout
    return lay_out(_specs(snapshot), partly=plan.delta.partly)


def write_part(
    storage: Storage, name: str, snapshot: Snapshot, plan: Plan, *, threads: int, on_block: OnBlock
) -> WrittenPart:
    """Write the image as object `name`; return once it is durable."""
    layout = layout_of(snapshot, plan)
    whole = plan.delta is None
    parts = {tensor: list(chunks(view)) for tensor, view in snapshot.views.items()}
    sink = storage.sink(name)
    try:
        sink.begin(layout.size_bytes)
        found = write_image(
            sink,
            snapshot.pieces if whole else image_pieces(layout, snapshot.views),
            [chunk for part in parts.values() for chunk in part] if whole else (),
            threads=threads,
            on_block=on_block,
        )
        sink.finish()
    finally:
        sink.abort()
    if plan.delta is not None and plan.digests is not None:
        tensors, files = entries(layout, _specs(snapshot), plan.digests, plan.delta.kept)
        return WrittenPart(layout=layout, tensors=tensors, files=files)
    left = iter(found)
    tensors = {
        tensor: TensorEntry(
            spec=place.spec,
            start=place.start,
            end=place.end,
            chunks=tuple(itertools.islice(left, len(parts[tensor]))),
        )
        for tensor, place in layout.places.items()
    }
    return WrittenPart(layout=layout, tensors=tensors)


def _specs(snapshot: Snapshot) -> dict[str, TensorSpec]:
    return {tensor: place.spec for tensor, place in snapshot.places.items()}
