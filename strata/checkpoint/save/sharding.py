"""Which rank writes which bytes of a tensor that several ranks have, and from which parts a restore reads the tensor.

Pure. The ranks that have the same tensors (*replicas* below) share the writing: all chunks of these
tensors are divided into equal shares of consecutive bytes.

    the tensors of one group of replicas, by name, one after the other
    |- a -|------------------- b -------------------|-- c --|------ d ------|
    |      replica 0      |      replica 1      |        replica 2          |

A sharded tensor is divided into boxes, each with offsets and a shape; each rank has some of the boxes. A restore, by
any number of ranks, reads for each requested box all saved boxes that overlap with it, whichever rank saved them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.format.digest import CHUNK_BYTES

Shape = tuple[int, ...]

MAX_COMPARED: Final = 500_000
"""The most pairs of boxes to compare if the boxes form no grid: all pairs of 1,000 boxes take two or three seconds."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: its start and its length in each dimension."""

    offsets: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """Return the box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of both boxes, or None."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Box) -> Box:
        """Return this box relative to `outer`, which contains it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.shape)

    def fits(self, shape: Shape) -> bool:
        """Return whether the box is within a tensor of this shape."""
        return len(self.offsets) == len(self.shape) == len(shape) and all(
            a >= 0 and n >= 0 and a + n <= m for a, n, m in zip(self.offsets, self.shape, shape, strict=True)
        )

    def hull(self, shape: Shape) -> tuple[int, int]:
        """Return the box's first index in a row-major tensor of this shape, and its last index plus 1."""
        first = last = 0
        for offset, length, size in zip(self.offsets, self.shape, shape, strict=True):
            first = first * size + offset
            last = last * size + offset + length - 1
        return first, last + 1

    def is_run(self, shape: Shape) -> bool:
        """Return whether the box's elements are consecutive in a row-major tensor of this shape."""
        first, end = self.hull(shape)
        return end - first == self.count

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that select the box from a NumPy or torch tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offsets, self.shape, strict=True))


# -- writing ----------------------------------------------------------------------------------


def share(size_bytes: Mapping[str, int], *, replica: int, replicas: int) -> dict[str, range]:
    """Return, for each tensor, the numbers of the chunks that replica `replica` writes; the range may be empty.

    `size_bytes` has the tensors that all replicas have. Every replica computes the same division without any
    message, and exactly one replica writes each chunk.
    """
    total = sum(size_bytes.values())
    mine: dict[str, range] = {}
    base = 0
    for name, size in sorted(size_bytes.items()):
        chunks = range(-(-size // CHUNK_BYTES))
        owners = [_owner(base, size, number, total=total, replicas=replicas) for number in chunks]
        # owners ascend, so one replica's chunks of a tensor are one run
        first, end = bisect.bisect_left(owners, replica), bisect.bisect_right(owners, replica)
        mine[name] = range(first, end)
        base += size
    return mine


def _owner(base: int, size: int, number: int, *, total: int, replicas: int) -> int:
    """Return the replica whose share contains the middle of a chunk."""
    start, end = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, size)
    return (2 * base + start + end) * replicas // (2 * total)


def gap(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Return why these boxes do not cover each element of a tensor exactly once; None if they do."""
    for box in boxes:
        if not box.fits(shape):
            return f"{list(box.shape)} at {list(box.offsets)} lies outside of {list(shape)}"
    ordered = sorted((box for box in boxes if box.count), key=lambda box: box.offsets)
    compared = 0
    for index, box in enumerate(() if _is_grid(ordered) else ordered):
        for other in itertools.islice(ordered, index + 1, None):
            if shape and other.offsets[0] >= box.offsets[0] + box.shape[0]:
                break
            compared += 1
            if compared > MAX_COMPARED:
                return f"its {len(ordered)} parts are laid out so that too many would have to be compared"
            if box.overlap(other) is not None:
                return f"the parts at {list(box.offsets)} and at {list(other.offsets)} overlap"
    held, total = sum(box.count for box in ordered), math.prod(shape)
    return None if held == total else f"{held} of {total} elements are there"


def _is_grid(boxes: Sequence[Box]) -> bool:
    """Return whether the boxes are distinct cells of a grid, as in most partitionings; such boxes do not overlap."""
    dimensions = len(boxes[0].shape) if boxes else 0
    if len(set(boxes)) != len(boxes):
        return False
    for number in range(dimensions):
        spans = sorted({(box.offsets[number], box.offsets[number] + box.shape[number]) for box in boxes})
        if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            return False
    return True


# -- reading ----------------------------------------------------------------------------------


def sources(requested: Box, pieces: Sequence[Box]) -> list[tuple[int, Box]] | None:
    """Return the number of each piece that overlaps `requested`, with the overlap; None if elements are missing.

    Two pieces that overlap must be equal; of equal pieces only the first is returned.
    """
    found: list[tuple[int, Box]] = []
    seen: set[Box] = set()
    for number, piece in enumerate(pieces):
        common = requested.overlap(piece) if piece not in seen else None
        if common is not None:
            seen.add(piece)
            found.append((number, common))
    return found if sum(box.count for _, box in found) == requested.count else None
