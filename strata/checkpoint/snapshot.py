"""Copies of the state that the trainer no longer touches.

The trainer's thread copies into one of a fixed number of arenas and goes on; whoever writes the
checkpoint reads from there, in the order of the image. Arenas are reused: fresh memory costs
several times its copy in page faults. They are kept out of forked children, in which each later
copy would fault again.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from dataclasses import dataclass

from strata.checkpoint.image import Layout, Place, lay_out
from strata.checkpoint.state import Flat, Json
from strata.checkpoint.tensors import copy_out


class Arena:
    """One block of memory that grows to the largest snapshot it had to hold."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def take(self, size_bytes: int) -> memoryview:
        """Return that much memory; what was taken before must not be used any more."""
        if self._map is None or len(self._map) < size_bytes:
            self._map = None  # given back before more is asked for
            self._map = allocate(size_bytes, inherited=False)
        return memoryview(self._map)[:size_bytes]


def allocate(size_bytes: int, *, inherited: bool) -> mmap.mmap:
    """Return private zeroed memory, in huge pages where the system has them.

    What is not `inherited` is not there in a forked child, who must not touch it.
    """
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE",) if inherited else ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(AttributeError, OSError):  # a kernel without it
            memory.madvise(getattr(mmap, advice))
    return memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The image of a state as of one moment: its trees, its layout, its bytes."""

    tree: Json
    rng: Json
    layout: Layout
    data: memoryview

    @property
    def places(self) -> Mapping[str, Place]:
        return self.layout.places

    def bytes_of(self, place: Place) -> memoryview:
        """Return the bytes of one tensor, read-only."""
        offset = len(self.layout.header)
        return self.data[place.start - offset : place.end - offset]


def take_snapshot(flat: Flat, *, tree: Json, rng: Json, arena: Arena) -> Snapshot:
    """Copy every tensor of `flat` into the arena; return once the state may be changed."""
    layout = lay_out({name: spec for name, (spec, _) in flat.tensors.items()})
    data = arena.take(layout.data_bytes)
    offset = len(layout.header)
    for name, place in layout.places.items():
        spec, value = flat.tensors[name]
        copy_out(value, spec, data[place.start - offset : place.end - offset])
    return Snapshot(tree=tree, rng=rng, layout=layout, data=data.toreadonly())
