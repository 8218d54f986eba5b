"""Which chunks of a state an Incremental writes, and the places of the others in earlier images.

Each chunk is compared by digest with the same chunk of the same tensor in the base. For an equal chunk the manifest
repeats the base's reference to the image that has the bytes, however old the image is. So the manifest of an
Incremental lists every chunk, and a restore follows no chain of manifests.
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
"""If a larger share of a part's bytes has changed, the part is written whole."""
MAX_REFERENCES: Final = 32
"""The most earlier attempts one checkpoint may refer to; the catalog has the same limit."""

Digests = Mapping[str, Sequence[str]]
"""The digests of the chunks of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The part of a state that an Incremental writes. `kept` are the unchanged chunks, by tensor and number.

    `partly` has the chunks to write of each tensor that is not written whole: the argument of `lay_out`.
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
        """Whether an Incremental pays: enough chunks are unchanged, and they belong to few enough attempts."""
        return (
            self.changed_bytes <= FULL_ABOVE * self.total_bytes
            and self.changed_bytes < self.total_bytes
            and len(self.uses) <= MAX_REFERENCES
        )

    @property
    def description(self) -> str:
        """The delta as a sentence for the log."""
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
    """Return the changes since `base`, which has the places of an earlier checkpoint's chunks.

    Other ranks have the tensors in `shares` as well; of these tensors, this rank writes only the given chunks.
    `changed_bytes` counts the changes of the whole state, including chunks that other ranks write: this rank compares
    them with its earlier digests (`before`). So the choice of Full or Incremental does not depend on a rank's share.
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
    """Yield the runs of consecutive numbers in `numbers`; these must ascend."""
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
    """Return the tensor entries of a manifest, and the files it refers to.

    `layout` describes the written chunks, `kept` the unchanged ones. `shards` has, for each sharded tensor, the
    shard that this rank has.
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
    """Return the bytes of the image as consecutive views; `views` are those of whole tensors."""
    spans = [(place.start, views[tensor]) for tensor, place in layout.places.items()]
    for piece in layout.pieces:
        begin = piece.first * CHUNK_BYTES
        spans.append((piece.start, views[piece.tensor][begin : begin + piece.end - piece.start]))
    return [memoryview(layout.header), *(view for _, view in sorted(spans, key=lambda span: span[0]))]


def _kept_runs(kept: Mapping[int, ChunkPlace], files: dict[ImageRef, int]) -> Iterator[Run]:
    """Yield a run for each sequence of consecutive chunks in a file; give each new file the next number in `files`."""
    places = [
        (number, files.setdefault(place.image, len(files) + 1), place.offset)
        for number, place in sorted(kept.items())
    ]

    def row(item: tuple[int, tuple[int, int, int]]) -> tuple[int, int, int]:
        """Return a key that is the same for chunks consecutive both by number and in their file."""
        index, (number, file, offset) = item
        return number - index, file, offset - number * CHUNK_BYTES

    for _, found in itertools.groupby(enumerate(places), key=row):
        run = [place for _, place in found]
        number, file, offset = run[0]
        yield Run(first=number, count=len(run), file=file, offset=offset)
