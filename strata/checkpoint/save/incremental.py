"""Which chunks of a state an Incremental writes, and where the others lie already.

Chunks are compared by digest with the same chunk of the same tensor in the base. What is equal is
named where the base names it, in the image that has the bytes, however long ago that was written:
the manifest of an Incremental lists every chunk, and no restore goes through a chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.format.chunk_map import ChunkPlace
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.entries import OWN, ImageRef, Run, Shard, TensorEntry
from strata.checkpoint.format.image import Layout
from strata.checkpoint.snapshot.tensors import TensorSpec

FULL_ABOVE: Final = 0.7
"""A part of which more than this share of the bytes has changed is written whole."""
MAX_REFERENCES: Final = 32
"""How many earlier attempts one checkpoint may use, as the catalog counts them too."""

Digests = Mapping[str, Sequence[str]]
"""The digests of the chunks of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What of a state is written. `kept` are the unchanged chunks, by tensor and number.

    `partly` are the chunks to be written of each tensor that is not written whole; it is what
    `lay_out` takes.
    """

    kept: Mapping[str, Mapping[int, ChunkPlace]]
    partly: Mapping[str, tuple[range, ...]]
    changed_bytes: int
    total_bytes: int

    @property
    def images(self) -> frozenset[ImageRef]:
        """The images that have the unchanged chunks."""
        return frozenset(place.image for kept in self.kept.values() for place in kept.values())

    @property
    def uses(self) -> frozenset[str]:
        """The folders of the attempts that these images belong to."""
        return frozenset(image.folder for image in self.images)

    @property
    def worth_it(self) -> bool:
        """Whether so much is unchanged, in so few attempts, that not everything is written."""
        return (
            self.changed_bytes <= FULL_ABOVE * self.total_bytes
            and self.changed_bytes < self.total_bytes
            and len(self.uses) <= MAX_REFERENCES
        )

    @property
    def told(self) -> str:
        """What it is, in words."""
        return (
            f"{self.changed_bytes} of {self.total_bytes} bytes have changed,"
            f" the others lie in {len(self.uses)} attempts"
        )


def compare(
    specs: Mapping[str, TensorSpec],
    digests: Digests,
    base: Mapping[str, Mapping[int, ChunkPlace]],
    shares: Mapping[str, range] | None = None,
    before: Digests | None = None,
) -> Delta:
    """Return what has changed since `base`, the places of the chunks of an earlier checkpoint.

    Of the tensors in `shares`, which other ranks hold as well, only these chunks are this rank's to
    write. Whether it is worth it goes by what has changed of the whole state, whoever wrote it: by the
    digests that this rank had `before`, too. So no rank decides otherwise for the size of its share.
    """
    shares, before = shares or {}, before or {}
    kept: dict[str, dict[int, ChunkPlace]] = {}
    partly: dict[str, tuple[range, ...]] = {}
    changed_bytes = total_bytes = 0
    for tensor, spec in specs.items():
        changed = []
        same: dict[int, ChunkPlace] = {}
        known, earlier = base.get(tensor, {}), before.get(tensor, ())
        mine = shares.get(tensor, range(len(digests[tensor])))
        for number, digest in enumerate(digests[tensor]):
            size_bytes = min(CHUNK_BYTES, spec.size_bytes - number * CHUNK_BYTES)
            total_bytes += size_bytes
            place = known.get(number)
            here = place is not None and (place.digest, place.size_bytes) == (digest, size_bytes)
            if not here and (number >= len(earlier) or earlier[number] != digest):
                changed_bytes += size_bytes
            if number not in mine:
                continue
            if place is not None and here:
                same[number] = place
            else:
                changed.append(number)
        if same:
            kept[tensor] = same
        if same or len(mine) < len(digests[tensor]):
            partly[tensor] = tuple(rows(changed))
    return Delta(kept=kept, partly=partly, changed_bytes=changed_bytes, total_bytes=total_bytes)


def rows(numbers: Iterable[int]) -> Iterator[range]:
    """Yield the rows of consecutive numbers in `numbers`, which ascend."""
    for _, row in itertools.groupby(enumerate(numbers), key=lambda each: each[1] - each[0]):
        found = [number for _, number in row]
        yield range(found[0], found[-1] + 1)


def entries(
    layout: Layout,
    specs: Mapping[str, TensorSpec],
    digests: Digests,
    kept: Mapping[str, Mapping[int, ChunkPlace]],
    shards: Mapping[str, Shard],
) -> tuple[dict[str, TensorEntry], tuple[ImageRef, ...]]:
    """Return the tensors of a manifest and its files: `layout` is of what was written, `kept` the rest.

    `shards` says of tensors that are parts which part.
    """
    files: dict[ImageRef, int] = {}
    written: dict[str, list[Run]] = {}
    for piece in layout.pieces:
        run = Run(first=piece.first, count=piece.count, file=OWN, offset=piece.start)
        written.setdefault(piece.tensor, []).append(run)
    found: dict[str, TensorEntry] = {}
    for tensor, spec in specs.items():
        chunks = tuple(digests[tensor])
        if (place := layout.places.get(tensor)) is not None:
            found[tensor] = TensorEntry(
                spec=spec, start=place.start, end=place.end, chunks=chunks, shard=shards.get(tensor)
            )
            continue
        runs = [*written.get(tensor, ()), *_kept_runs(kept.get(tensor, {}), files)]
        found[tensor] = TensorEntry(
            spec=spec,
            runs=tuple(sorted(runs, key=lambda run: run.first)),
            chunks=chunks,
            shard=shards.get(tensor),
        )
    return found, tuple(files)


def image_pieces(layout: Layout, views: Mapping[str, memoryview]) -> list[memoryview]:
    """Return the bytes of the image, one after the other; `views` are those of whole tensors."""
    spans = [(place.start, views[tensor]) for tensor, place in layout.places.items()]
    for piece in layout.pieces:
        begin = piece.first * CHUNK_BYTES
        spans.append((piece.start, views[piece.tensor][begin : begin + piece.end - piece.start]))
    return [memoryview(layout.header), *(view for _, view in sorted(spans, key=lambda span: span[0]))]


def _kept_runs(kept: Mapping[int, ChunkPlace], files: dict[ImageRef, int]) -> Iterator[Run]:
    """Yield chunks that follow each other in their file as one run; number new files."""
    places = [
        (number, files.setdefault(place.image, len(files) + 1), place.offset)
        for number, place in sorted(kept.items())
    ]

    def row(item: tuple[int, tuple[int, int, int]]) -> tuple[int, int, int]:
        """Return what all have in common that follow each other, by number and in their file."""
        index, (number, file, offset) = item
        return number - index, file, offset - number * CHUNK_BYTES

    for _, found in itertools.groupby(enumerate(places), key=row):
        run = [place for _, place in found]
        number, file, offset = run[0]
        yield Run(first=number, count=len(run), file=file, offset=offset)
