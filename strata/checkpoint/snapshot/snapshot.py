"""Copies of the state; the trainer changes only the state, not the copies.

The trainer's thread copies into one of a fixed number of arenas and goes on. The writer's thread reads the beginning
of the arena while the rest is still being copied. A snapshot has the layout of its image, header included, at an
aligned address, so that direct I/O writes the snapshot without another copy.

Tensors in plain memory are copied as bytes, large ones by a few threads. Other tensors (strided, on a device) are
copied by their own library.

An arena remembers the digests of its last snapshot. For an Incremental the state is hashed in place, and a chunk
that the arena has already is not copied: hashing costs the trainer less than copying, and the writer need not hash
again. A chunk that is copied is hashed in the arena, so that its digest matches the bytes to be written even if
other code changes the state meanwhile. The snapshot is always whole, so the save may become a Full.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strata.checkpoint.format.digest import CHUNK_BYTES, chunks, digest
from strata.checkpoint.format.entries import Shard
from strata.checkpoint.format.image import Layout, Place, lay_out
from strata.checkpoint.save.replicated_tensors import Replica
from strata.checkpoint.save.sharding import share
from strata.checkpoint.snapshot.cuda_copies import Copy, CudaCopies, Pending, is_on_device, pin
from strata.checkpoint.snapshot.memory import PAGE_BYTES, Arena, Held, copy
from strata.checkpoint.snapshot.staging import Staging
from strata.checkpoint.snapshot.state import Flat, Json
from strata.checkpoint.snapshot.tensors import COPY_THREADS, copy_out, in_place
from strata.checkpoint.storage.pipeline import groups, spread
from strata.checkpoint.storage.sink import unobserved
from strata.errors import CheckpointAborted

__all__ = ["Arena", "Snapshot", "take_snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The image of a state as of one moment: its trees, its layout, its bytes.

    `pieces` are the bytes of the image, one after the other; `views` are the bytes of each tensor. All bytes may
    be read after `wait()`, the first n after `wait(n)`. `kept` owns the bytes; None if an arena does.
    `shards` has, for each tensor that is a part, its place in the larger tensor. `shares` has this rank's chunks of
    tensors that other ranks have as well. `mesh` is the rank's place in the partitioning. `digests` are the chunk
    digests of each tensor, if known already; otherwise `on_hashed` is called with the digests once computed.
    """

    tree: Json
    rng: Json
    layout: Layout
    pieces: Sequence[memoryview]
    views: Mapping[str, memoryview]
    kept: object = None
    staging: Staging = field(default_factory=Staging)
    pending: Pending = field(default_factory=Pending)
    shards: Mapping[str, Shard] = field(default_factory=dict)
    shares: Mapping[str, range] = field(default_factory=dict)
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    digests: Mapping[str, Sequence[str]] | None = None
    begun_s: float | None = None
    """The monotonic time at which the copy began; None if the state is written from the trainer's own memory."""
    taken_s: float = 0.0
    on_hashed: Callable[[Mapping[str, Sequence[str]]], None] = unobserved

    def wait(self, size_bytes: int | None = None) -> None:
        """Return once the image's first `size_bytes` are copied, or all of it.

        Copies from devices may go on after the snapshot was taken; with `ahead`, other copies may, too.
        `CheckpointAborted` if such a copy fails.
        """
        self.staging.wait(size_bytes)
        self.pending.wait()

    def settle(self) -> None:
        """Return once nothing is being copied any more, successful or not, so that the memory can be reused."""
        with contextlib.suppress(CheckpointAborted):
            self.staging.wait()
        self.pending.wait()

    @property
    def copy_s(self) -> float | None:
        """The seconds for which the trainer waited for the copy; None if there was no copy."""
        return None if self.begun_s is None else max(self.taken_s, self.staging.done_s) - self.begun_s

    @property
    def places(self) -> Mapping[str, Place]:
        return self.layout.places


def image_bytes(flat: Flat) -> int:
    """Return the memory that a snapshot of `flat` takes."""
    return _layout_of(flat).size_bytes


def look_at(flat: Flat, *, tree: Json, rng: Json, arena: Arena) -> Snapshot:
    """Return the image of a state in the trainer's memory; the state must not change while the image is used.

    Tensors not laid out as in an image (strided ones, and those on a device) are copied to the arena. A copy has
    the same offset within a page as in the image, so that direct I/O writes it without another copy.
    """
    layout = _layout_of(flat)
    lying = {name: in_place(flat.tensors[name][1], place.spec) for name, place in layout.places.items()}
    copies: dict[str, tuple[int, int]] = {}
    end = 0
    for name, place in layout.places.items():
        if lying[name] is None:
            begin = end + (place.start - end) % PAGE_BYTES
            end = begin + place.spec.size_bytes
            copies[name] = begin, end
    memory = arena.take(end) if copies else memoryview(b"")
    views: dict[str, memoryview] = {}
    for name, place in layout.places.items():
        if (source := lying[name]) is None:
            begin, end = copies[name]
            source = memory[begin:end]
            copy_out(flat.tensors[name][1], place.spec, source)
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
    hashed: bool = False,
    ahead: bool = False,
) -> Snapshot:
    """Copy every tensor of `flat` into the arena; return once the state may be changed.

    With `cuda`, copies from CUDA devices go on after the return, and hooks make the `optimizers` wait for them.
    `hashed`: also compute the digests, and do not copy chunks that the arena has; ignored if there are copies from
    devices. `ahead`: return before plain memory is copied; the caller then copies by `staging.run`. Ignored if hashed.
    """
    begun_s = time.monotonic()
    layout = _layout_of(flat)
    image = arena.take(layout.size_bytes)
    before, arena.held = arena.held, None
    image[: len(layout.header)] = layout.header
    plain: list[_Plain] = []
    on_device: list[Copy] = []
    others: list[Copy] = []
    for name, place in layout.places.items():
        spec, value = flat.tensors[name]
        into = image[place.start : place.end]
        if cuda is not None and spec.size_bytes and is_on_device(value):
            on_device.append(Copy(value, spec, into))
        elif (source := in_place(value, spec)) is None:
            others.append(Copy(value, spec, into))
            plain.extend(_Plain(name, number, chunk, None) for number, chunk in enumerate(chunks(into)))
        else:
            pairs = enumerate(zip(chunks(into), chunks(source), strict=True))
            plain.extend(_Plain(name, number, *pair) for number, pair in pairs)
    pending = Pending()
    staging = Staging()
    known: dict[str, tuple[str, ...]] | None = None
    try:
        if cuda is not None and on_device:
            arena.pin(pin)
            pending = cuda.start(on_device, optimizers)  # goes on while the other tensors are copied
        for one in others:
            copy_out(one.value, one.spec, one.into)
        if hashed and not on_device:
            same = before is not None and before.header == layout.header
            known = _copy_and_hash(plain, before.digests if before is not None and same else {}, threads)
            known = {name: known.get(name, ()) for name in layout.places}
            arena.held = Held(header=layout.header, digests=known)
        else:
            staging = _staging(plain, begin=len(layout.header), kept=flat)
            if not ahead:
                staging.run(threads)
    except BaseException:
        pending.wait()  # the device copies must end before the arena is used again
        raise

    def on_hashed(digests: Mapping[str, Sequence[str]]) -> None:
        arena.held = Held(header=layout.header, digests=digests)

    image = image.toreadonly()
    return Snapshot(
        tree=tree,
        rng=rng,
        layout=layout,
        pieces=(image,),
        views={name: image[place.start : place.end] for name, place in layout.places.items()},
        staging=staging,
        pending=pending,
        shards=flat.shards,
        mesh=flat.mesh,
        shares=shares_of(flat),
        digests=known,
        begun_s=begun_s,
        taken_s=time.monotonic(),
        on_hashed=on_hashed,
    )


def _layout_of(flat: Flat) -> Layout:
    """Return the layout of `flat`: parts of larger tensors last, so that tensors to compare are copied first."""
    names = sorted(flat.tensors, key=lambda name: name in flat.shards)
    return lay_out({name: flat.tensors[name][0] for name in names})


def shares_of(flat: Flat) -> dict[str, range]:
    """Return the chunks that this process writes of each tensor that other processes have as well."""
    groups: dict[Replica, dict[str, int]] = {}
    for name, replica in flat.replicas.items():
        groups.setdefault(replica, {})[name] = flat.tensors[name][0].size_bytes
    found: dict[str, range] = {}
    for replica, sizes in groups.items():
        found |= share(sizes, replica=replica.number, replicas=replica.count)
    return found


class _Plain(NamedTuple):
    """A chunk of a tensor: its target, and its source in plain memory; no source if it is copied already."""

    tensor: str
    number: int
    into: memoryview
    source: memoryview | None


def _staging(plain: Sequence[_Plain], *, begin: int, kept: Flat) -> Staging:
    """Return the `Staging` of all chunks not copied yet; `begin` is the offset of the first chunk's target.

    The chunks are views of the tensors of `kept`, and the views do not keep those tensors alive.
    """
    runs = groups([len(one.into) for one in plain], CHUNK_BYTES)
    ends = list(itertools.accumulate((len(one.into) for one in plain), initial=begin))

    def work(number: int) -> None:
        for index in runs[number]:
            one = plain[index]
            if one.source is not None:
                copy(one.into, one.source)

    return Staging([ends[run.stop] for run in runs], work, kept=kept)


def _copy_and_hash(
    plain: Sequence[_Plain], before: Mapping[str, Sequence[str]], threads: int
) -> dict[str, tuple[str, ...]]:
    """Copy each chunk whose digest differs from the arena's (`before`); return the digests of all chunks."""
    runs, found = groups([len(one.into) for one in plain], CHUNK_BYTES), [""] * len(plain)

    def work(number: int) -> None:
        for index in runs[number]:
            one = plain[index]
            if one.source is not None:
                if one.tensor in before and digest(one.source) == before[one.tensor][one.number]:
                    found[index] = before[one.tensor][one.number]
                    continue
                copy(one.into, one.source)
            found[index] = digest(one.into)

    spread(len(runs), work, threads=threads)
    digests: dict[str, list[str]] = {}
    for one, text in zip(plain, found, strict=True):
        digests.setdefault(one.tensor, []).append(text)
    return {name: tuple(texts) for name, texts in digests.items()}
