"""Copies of the state that the trainer no longer touches.

The trainer's thread copies into one of a fixed number of arenas and goes on; whoever writes the
checkpoint reads from there. A snapshot is laid out as its image, header and all, from an aligned
address on, so that direct I/O writes it as it lies.

Tensors that lie in plain memory are copied as bytes, large ones by a few threads; others (strided,
on a device) by their own library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.digest import CHUNK_BYTES, chunks
from strata.checkpoint.image import Layout, Place, lay_out
from strata.checkpoint.memory import Arena, allocate, copy
from strata.checkpoint.pipeline import spread
from strata.checkpoint.state import Flat, Json
from strata.checkpoint.tensors import copy_out, in_place

__all__ = ["Arena", "Snapshot", "take_snapshot"]

COPY_THREADS: Final = 2
"""What one thread cannot take of the memory's bandwidth, a second one does; a third finds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The image of a state as of one moment: its trees, its layout, its bytes.

    `pieces` are the bytes of the image, one after the other; `views` those of each tensor. `kept`
    is what they lie in, where that is not an arena.
    """

    tree: Json
    rng: Json
    layout: Layout
    pieces: Sequence[memoryview]
    views: Mapping[str, memoryview]
    kept: object = None

    @property
    def places(self) -> Mapping[str, Place]:
        return self.layout.places


def image_bytes(flat: Flat) -> int:
    """Return how much memory a snapshot of `flat` takes."""
    return lay_out({name: spec for name, (spec, _) in flat.tensors.items()}).size_bytes


def look_at(flat: Flat, *, tree: Json, rng: Json) -> Snapshot:
    """Return the image of a state where it lies; the state must not change while that is used.

    Tensors that do not lie as an image has them are copied: strided ones, and those on a device.
    """
    layout = lay_out({name: spec for name, (spec, _) in flat.tensors.items()})
    views: dict[str, memoryview] = {}
    for name in layout.places:
        spec, value = flat.tensors[name]
        source = in_place(value, spec)
        if source is None:
            source = allocate(spec.size_bytes, inherited=False)[: spec.size_bytes]
            copy_out(value, spec, source)
        views[name] = source.toreadonly()
    pieces = (memoryview(layout.header), *views.values())
    return Snapshot(tree=tree, rng=rng, layout=layout, pieces=pieces, views=views, kept=flat)


def take_snapshot(
    flat: Flat, *, tree: Json, rng: Json, arena: Arena, threads: int = COPY_THREADS
) -> Snapshot:
    """Copy every tensor of `flat` into the arena; return once the state may be changed."""
    layout = lay_out({name: spec for name, (spec, _) in flat.tensors.items()})
    image = arena.take(layout.size_bytes)
    image[: len(layout.header)] = layout.header
    plain: list[tuple[memoryview, memoryview]] = []
    for name, place in layout.places.items():
        spec, value = flat.tensors[name]
        into = image[place.start : place.end]
        source = in_place(value, spec)
        if source is None:
            copy_out(value, spec, into)
        else:
            plain.extend(zip(chunks(into), chunks(source), strict=True))
    _copy_all(plain, threads)
    image = image.toreadonly()
    return Snapshot(
        tree=tree,
        rng=rng,
        layout=layout,
        pieces=(image,),
        views={name: image[place.start : place.end] for name, place in layout.places.items()},
    )


def _copy_all(pairs: Sequence[tuple[memoryview, memoryview]], threads: int) -> None:
    """Copy each (into, source), in runs long enough that threads pay."""
    runs: list[list[tuple[memoryview, memoryview]]] = [[]]
    room = CHUNK_BYTES
    for pair in pairs:
        if room <= 0:
            runs.append([])
            room = CHUNK_BYTES
        runs[-1].append(pair)
        room -= len(pair[0])

    def work(number: int) -> None:
        for into, source in runs[number]:
            copy(into, source)

    spread(len(runs), work, threads=threads)
