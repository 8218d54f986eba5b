"""Copies of the state that the trainer no longer touches.

The trainer's thread copies into one of a fixed number of arenas and goes on; whoever writes the
checkpoint reads from there. A snapshot is laid out as its image, header and all, from an aligned
address on, so that direct I/O writes it as it lies.

Tensors that lie in plain memory are copied as bytes, large ones by a few threads; others (strided,
on a device) by their own library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.checkpoint.cuda_copies import Copy, CudaCopies, Pending, is_on_device, pin
from strata.checkpoint.digest import CHUNK_BYTES, chunks
from strata.checkpoint.entries import Shard
from strata.checkpoint.image import Layout, Place, lay_out
from strata.checkpoint.memory import Arena, allocate, copy
from strata.checkpoint.pipeline import spread
from strata.checkpoint.replication import Replica
from strata.checkpoint.sharding import share
from strata.checkpoint.state import Flat, Json
from strata.checkpoint.tensors import COPY_THREADS, copy_out, in_place

__all__ = ["Arena", "Snapshot", "take_snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The image of a state as of one moment: its trees, its layout, its bytes.

    `pieces` are the bytes of the image, one after the other; `views` those of each tensor. They
    may be read after `wait`. `kept` is what they lie in, where that is not an arena. `shards` says of
    which larger tensor one is a part, and `shares` which chunks fall to this rank of those that others
    hold as well; `mesh` is the rank's place in the partitioning.
    """

    tree: Json
    rng: Json
    layout: Layout
    pieces: Sequence[memoryview]
    views: Mapping[str, memoryview]
    kept: object = None
    pending: Pending = field(default_factory=Pending)
    shards: Mapping[str, Shard] = field(default_factory=dict)
    shares: Mapping[str, range] = field(default_factory=dict)
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def wait(self) -> None:
        """Return once every byte is there: copies from devices go on after the snapshot was taken."""
        self.pending.wait()

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
    return Snapshot(
        tree=tree,
        rng=rng,
        layout=layout,
        pieces=pieces,
        views=views,
        kept=flat,
        shards=flat.shards,
        mesh=flat.mesh,
        shares=shares_of(flat),
    )


def take_snapshot(
    flat: Flat,
    *,
    tree: Json,
    rng: Json,
    arena: Arena,
    threads: int = COPY_THREADS,
    cuda: CudaCopies | None = None,
    optimizers: Sequence[Any] = (),
) -> Snapshot:
    """Copy every tensor of `flat` into the arena; return once the state may be changed.

    With `cuda`, copies from CUDA devices go on behind that, and `optimizers` know when to wait.
    """
    layout = lay_out({name: spec for name, (spec, _) in flat.tensors.items()})
    image = arena.take(layout.size_bytes)
    image[: len(layout.header)] = layout.header
    plain: list[tuple[memoryview, memoryview]] = []
    on_device: list[Copy] = []
    others: list[Copy] = []
    for name, place in layout.places.items():
        spec, value = flat.tensors[name]
        into = image[place.start : place.end]
        if cuda is not None and spec.size_bytes and is_on_device(value):
            on_device.append(Copy(value, spec, into))
        elif (source := in_place(value, spec)) is None:
            others.append(Copy(value, spec, into))
        else:
            plain.extend(zip(chunks(into), chunks(source), strict=True))
    pending = Pending()
    if cuda is not None and on_device:
        arena.pin(pin)
        pending = cuda.start(on_device, optimizers)  # it runs while the others are copied
    try:
        for one in others:
            copy_out(one.value, one.spec, one.into)
        _copy_all(plain, threads)
    except BaseException:
        pending.wait()  # the arena is used again
        raise
    image = image.toreadonly()
    return Snapshot(
        tree=tree,
        rng=rng,
        layout=layout,
        pieces=(image,),
        views={name: image[place.start : place.end] for name, place in layout.places.items()},
        pending=pending,
        shards=flat.shards,
        mesh=flat.mesh,
        shares=shares_of(flat),
    )


def shares_of(flat: Flat) -> dict[str, range]:
    """Return which chunks this process writes of each tensor that others hold as well."""
    groups: dict[Replica, dict[str, int]] = {}
    for name, replica in flat.replicas.items():
        groups.setdefault(replica, {})[name] = flat.tensors[name][0].size_bytes
    found: dict[str, range] = {}
    for replica, sizes in groups.items():
        found |= share(sizes, replica=replica.number, replicas=replica.count)
    return found


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
