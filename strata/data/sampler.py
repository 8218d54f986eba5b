"""The elastic sampler: the same global batches, whichever world trains on them.

An epoch is an `Order` of the samples, cut into global batches of `global_batch`. A rank takes a
contiguous share of each; when that is more than it can take at once, in several pieces, after the
last of which its optimizer steps. So the position of a training is one number, the samples that
completed steps have used, and a world of another size goes on from it with the very next one.

    global batch 48      world of 3: 16 samples a rank      world of 5: 10, 10, 10, 9, 9      world of 2: 24
    with `most` 16       1 piece of 16                      1 of 10 or of 9                   2 of 12

Shares differ by one sample where the world does not divide the batch, which `weight` makes up for;
but all ranks take as many pieces, for each is a backward pass, in which they meet. The last batch of
an epoch may be smaller. Unless `drop_last`, it is divided alike; one that has fewer samples than the
world has ranks is left out, since a rank without a sample could not take part in the step. Nothing
is padded, and nothing comes twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strata.data.order import Order, shares
from strata.errors import ConfigError, InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank takes at once: the places `begin` to before `end` of the epoch's order.

    `last`: the optimizer steps after it. `step_samples` are those of the whole step, over all
    ranks. `weight` is what its mean loss counts in the step, so that after the mean over the ranks
    each sample has counted alike: `(loss * weight).backward()`.
    """

    begin: int
    end: int
    last: bool
    step_samples: int
    weight: float


def check_split(global_batch: int, world_size: int, *, uneven: bool) -> None:
    """Raise `ConfigError`, naming the nearest legal splits, unless every rank gets something.

    Unless `uneven`, every rank must get as much.
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
    """Return in how many pieces each rank takes its share, one of `parts`: as many for all of them.

    As few as possible, of at most `most` samples each; unless `uneven`, so many that all are alike.
    Only where `most` is 1 and the shares differ has a piece one more: no piece may be empty.
    """
    largest, smallest = max(parts), min(parts)
    count = 1 if most is None else -(-largest // most)
    if not uneven:
        while largest % count:
            count += 1
    return min(count, smallest)


class ElasticSampler:
    """Which samples of a dataset of `length` make which step, for any world.

    Made alike on every rank. `run.steps(sampler)` yields lists of indices; `run.steps(loader)` makes
    one of an ordinary DataLoader.
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
        """`most`: samples that a rank takes at once (None: its whole share of a step).

        `uneven`: a world that does not divide the global batch is no reason to refuse to train.
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
        """Return how many optimizer steps the epoch has after its first `done` samples."""
        return sum(1 for _ in self._batches(world_size, done))

    def left_out(self, world_size: int) -> int:
        """Return how many samples of each epoch nobody trains on in such a world."""
        rest = self.length % self.global_batch
        return rest if self.drop_last or rest < world_size else 0

    def pieces(self, rank: int, world_size: int, *, done: int = 0) -> Iterator[Piece]:
        """Yield what `rank` takes, in order, after the first `done` samples of an epoch."""
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
        """Yield the places of each global batch that is left."""
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
        """Return what must stay the same for the order to stay the same, for a checkpoint."""
        return {"length": self.length, "global_batch": self.global_batch, "seed": self.seed}
