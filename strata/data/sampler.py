"""`ElasticSampler`: the same global batches in a world of any size.

An epoch is an `Order` of the samples, cut into global batches of `global_batch` samples. Each rank takes a
contiguous share of each batch. If the share is more than a rank can take at once, the rank takes it in several
pieces, and its optimizer steps after the last piece. So the position of a training is one number: the samples that
completed steps have used. A world of another size continues from this number with the next sample.

    global batch 48      world of 3: 16 samples a rank      world of 5: 10, 10, 10, 9, 9      world of 2: 24
    with `most` 16       1 piece of 16                      1 of 10 or of 9                   2 of 12

If the world's size does not divide the batch, shares differ by one sample, which `weight` compensates for. All
ranks take the same number of pieces, since each piece is a backward pass with a collective of all ranks. The last
batch of an epoch may be smaller: unless `drop_last`, this batch is divided in the same way. A last batch with fewer
samples than ranks is left out, since a rank without a sample could not take part in the step. No sample is padded
or repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strata.data.order import Order, shares
from strata.errors import ConfigError, InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The samples that one rank takes at once: the places from `begin` to before `end` of the epoch's order.

    `last`: the optimizer steps after this piece. `step_samples` counts the samples of the whole step, over all
    ranks. `weight` is the weight of the piece's mean loss in the step: `(loss * weight).backward()`. With this
    weight, each sample counts equally in the mean over the ranks.
    """

    begin: int
    end: int
    last: bool
    step_samples: int
    weight: float


def check_split(global_batch: int, world_size: int, *, uneven: bool) -> None:
    """Raise `ConfigError`, naming the nearest legal splits, unless every rank gets a sample.

    Unless `uneven`, all ranks must get the same number of samples.
    """
    if global_batch < world_size:
        raise ConfigError(
            f"a global batch of {global_batch} samples leaves none for {world_size - global_batch}"
            f" of {world_size} ranks",
            hint=f"train with at most {global_batch} ranks, or with a global batch of at least {world_size}",
        )
    if uneven or global_batch % world_size == 0:
        return
    worlds = [n for n in range(1, global_batch + 1) if global_batch % n == 0] if global_batch < 10**6 else [1]
    below = max((n for n in worlds if n < world_size), default=None)
    above = min((n for n in worlds if n > world_size), default=None)
    legal = " or ".join(str(n) for n in (below, above) if n is not None)
    less = global_batch // world_size * world_size
    raise ConfigError(
        f"a global batch of {global_batch} samples cannot be split evenly over {world_size} ranks",
        hint=f"train with {legal} ranks, or with a global batch of {less} or {less + world_size};"
        " uneven=True allows shares that differ, for losses that are weighted by run.weight",
    )


def piece_count(parts: Sequence[int], most: int | None, *, uneven: bool) -> int:
    """Return the number of pieces into which every rank divides its share, one of `parts`; the same for all ranks.

    The number is the smallest with which no piece has more than `most` samples. Unless `uneven`, all pieces must
    also be of equal size. A piece exceeds `most`, by one, only if `most` is 1 and the shares differ, since no piece
    may be empty.
    """
    largest, smallest = max(parts), min(parts)
    count = 1 if most is None else -(-largest // most)
    if not uneven:
        while largest % count:
            count += 1
    return min(count, smallest)


class ElasticSampler:
    """Assigns the samples of a dataset of `length` samples to steps and ranks, for any world.

    Every rank must make the sampler with the same arguments. `run.steps(sampler)` yields lists of indices.
    `run.steps(loader)` makes an `ElasticSampler` for an ordinary DataLoader.
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch: int,
        most: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        uneven: bool = True,
    ) -> None:
        """`most` is the number of samples a rank takes at once (None: its whole share of a step).

        `uneven` allows a world whose size does not divide the global batch; without it such a world is refused.
        """
        for name, value in (("length", length), ("global_batch", global_batch), ("most", most)):
            if value is None and name == "most":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name} is {value!r}, not a number of samples", hint="from 1 on")
        self.length = length
        self.global_batch = global_batch
        self.most = most
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.uneven = uneven

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch's samples."""
        return Order(self.length, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def steps_left(self, world_size: int, *, done: int = 0) -> int:
        """Return the number of optimizer steps left in the epoch after its first `done` samples."""
        return sum(1 for _ in self._batches(world_size, done))

    def left_out(self, world_size: int) -> int:
        """Return the number of samples of each epoch that a world of this size leaves out."""
        rest = self.length % self.global_batch
        return rest if self.drop_last or rest < world_size else 0

    def pieces(self, rank: int, world_size: int, *, done: int = 0) -> Iterator[Piece]:
        """Yield the pieces of `rank`, in order, after the first `done` samples of an epoch."""
        check_split(self.global_batch, world_size, uneven=self.uneven)
        for begin, end in self._batches(world_size, done):
            whole = end - begin
            parts = shares(whole, world_size)
            at = begin + sum(parts[:rank])
            full = whole == self.global_batch
            count = piece_count(parts, self.most, uneven=self.uneven or not full)
            sizes = shares(parts[rank], count)
            for number, size in enumerate(sizes, 1):
                yield Piece(
                    begin=at,
                    end=at + size,
                    last=number == len(sizes),
                    step_samples=whole,
                    weight=size * world_size / whole,
                )
                at += size

    def _batches(self, world_size: int, done: int) -> Iterator[tuple[int, int]]:
        """Yield the places of each remaining global batch."""
        at = done
        while at + self.global_batch <= self.length:
            yield at, at + self.global_batch
            at += self.global_batch
        if self.length - at >= world_size and not self.drop_last:
            yield at, self.length

    def indices(self, epoch: int, rank: int, world_size: int, *, done: int = 0) -> Iterator[list[int]]:
        """Yield the samples of each piece, as indices into the dataset."""
        order = self.order(epoch)
        for piece in self.pieces(rank, world_size, done=done):
            yield order.take(piece.begin, piece.end)

    def facts(self) -> dict[str, Any]:
        """Return, for a checkpoint, the settings that determine the order of samples."""
        return {"length": self.length, "global_batch": self.global_batch, "seed": self.seed}
