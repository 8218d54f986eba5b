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

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strata.data.facts import MAX_FINGERPRINT_CHARS, ORDER_V1, SEQUENTIAL, DatasetFacts
from strata.data.order import DrawnOrder, EpochOrder, Order, shares
from strata.errors import ConfigError, DatasetMismatch, InvalidArgument


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


def piece_count(parts: Sequence[int], most: int | None, *, uneven: bool, wanted: int | None = None) -> int:
    """Return the number of pieces into which every rank divides its share, one of `parts`; the same for all ranks.

    The number is `wanted`, or else the smallest with which no piece has more than `most` samples. Unless `uneven`, all
    pieces must also be of equal size. No piece may be empty: so there are fewer than `wanted` if the smallest share has
    fewer samples, and a piece exceeds `most`, by one, if `most` is 1 and the shares differ.
    """
    largest, smallest = max(parts), min(parts)
    count = wanted or (1 if most is None else -(-largest // most))
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
        count: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        uneven: bool = True,
        fingerprint: str = "",
    ) -> None:
        """`most` is the number of samples a rank takes at once (None: its whole share of a step).

        `count` is the number of pieces of a share in every world, instead of `most`.
        `uneven` allows a world whose size does not divide the global batch; without it such a world is refused.
        `fingerprint` identifies the dataset's content: a restart in the middle of an epoch is refused with another.
        """
        optional = {name: value for name, value in (("most", most), ("count", count)) if value is not None}
        for name, value in {"length": length, "global_batch": global_batch, **optional}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name} is {value!r}, not a number of samples", hint="from 1 on")
        if not isinstance(fingerprint, str) or len(fingerprint) > MAX_FINGERPRINT_CHARS:
            raise InvalidArgument(
                f"fingerprint is no text of at most {MAX_FINGERPRINT_CHARS} characters",
                hint="pass a digest, such as a sha256 in hex",
            )
        self.length = length
        self.global_batch = global_batch
        self.most = most
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.uneven = uneven
        self.fingerprint = fingerprint

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch's samples."""
        return Order(self.length, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def described(self, epoch: int, *, dataset: str) -> DatasetFacts:
        """Return the facts that determine which samples the first places of `epoch` hold."""
        return DatasetFacts(
            dataset=dataset,
            order=ORDER_V1 if self.shuffle else SEQUENTIAL,
            length=self.length,
            seed=self.seed if self.shuffle else None,
            fingerprint=self.fingerprint,
        )

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
        if done > self.length:
            raise DatasetMismatch(
                f"the training is at sample {done} of an epoch that has {self.length} samples",
                hint="use the dataset of before, or begin the next epoch: run.steps(sampler, epoch=…)",
            )
        for begin, end in self._batches(world_size, done):
            whole = end - begin
            parts = shares(whole, world_size)
            at = begin + sum(parts[:rank])
            sizes = shares(parts[rank], self._piece_count(whole, world_size))
            for number, size in enumerate(sizes, 1):
                yield Piece(
                    begin=at,
                    end=at + size,
                    last=number == len(sizes),
                    step_samples=whole,
                    weight=size * world_size / whole,
                )
                at += size

    def pieces_an_epoch(self, world_size: int) -> int:
        """Return the number of each rank's pieces in a whole epoch."""
        check_split(self.global_batch, world_size, uneven=self.uneven)
        steps, rest = divmod(self.length, self.global_batch)
        pieces = steps * self._piece_count(self.global_batch, world_size) if steps else 0
        if self.drop_last or rest < world_size:
            return pieces
        return pieces + self._piece_count(rest, world_size)

    def _piece_count(self, whole: int, world_size: int) -> int:
        """Return the number of each rank's pieces in a step of `whole` samples."""
        uneven = self.uneven or whole != self.global_batch
        return piece_count(shares(whole, world_size), self.most, uneven=uneven, wanted=self.count)

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
        pieces = self.pieces(rank, world_size, done=done)
        return self.order(epoch).takes((piece.begin, piece.end) for piece in pieces)

    def facts(self) -> dict[str, Any]:
        """Return, for a checkpoint, the settings that determine the order of samples."""
        return {"length": self.length, "global_batch": self.global_batch, "seed": self.seed}


class DrawnSampler(ElasticSampler):
    """Assigns the samples that another sampler draws: `draw(epoch)` returns an epoch's indices, in order.

    `draw` must be a function of the epoch alone, the same on all ranks. Each epoch has `length` indices.
    """

    def __init__(
        self, draw: Callable[[int], Sequence[int]], length: int, *, name: str, **settings: Any
    ) -> None:
        super().__init__(length, **settings)
        self._draw = draw
        self._name = name
        self._drawn: tuple[int, Sequence[int]] | None = None

    def order(self, epoch: int) -> DrawnOrder:
        """Return the order that the sampler draws for `epoch`."""
        return DrawnOrder(self._indices(epoch))

    def described(self, epoch: int, *, dataset: str) -> DatasetFacts:
        """Return the facts, with a digest of what the sampler draws for `epoch`."""
        return DatasetFacts(
            dataset=dataset,
            order=self._name,
            length=self.length,
            fingerprint=self.fingerprint,
            drawn=digest_of(self._indices(epoch)),
        )

    def _indices(self, epoch: int) -> Sequence[int]:
        if self._drawn is None or self._drawn[0] != epoch:
            indices = self._draw(epoch)
            if len(indices) != self.length:
                raise DatasetMismatch(
                    f"{self._name} drew {len(indices)} indices for epoch {epoch}, and its length is {self.length}",
                    hint="a sampler's len() must be the number of indices that it gives in every epoch",
                )
            self._drawn = epoch, indices
        return self._drawn[1]


def digest_of(indices: Sequence[int]) -> str:
    """Return a digest of a list of indices, the same on every machine."""
    numbers = array("q", indices)
    if sys.byteorder == "big":
        numbers.byteswap()
    return hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()
