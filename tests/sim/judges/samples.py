"""The samples of a simulated training, and the rule: each sample of an epoch is in exactly one committed step.

Every rank draws its samples with the shipped feed, from the position in its restore point, and notes them before it
arrives at the step's barrier. A rank's position at a save stands for the bytes of its part of the checkpoint. Each commit
is followed back, from restore point to restore point, to the first step. The samples of these steps must be those of a
training without faults, in the same global order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from strata.data.order import Order
from strata.data.sampler import ElasticSampler
from strata.training.loop.elastic_feed import ElasticFeed
from strata.training.save.state import Position

GLOBAL_BATCH: Final = 24
LENGTH: Final = 10 * GLOBAL_BATCH
SEED: Final = 11
MOST: Final = 2
"""Samples that a rank takes at once: a step has several batches."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of one attempt's checkpoint."""

    generation: int
    step: int
    position: Position


@dataclass(slots=True)
class Samples:
    """The samples and positions of all ranks."""

    used: dict[tuple[int, int], dict[int, list[int]]] = field(default_factory=dict)
    """(generation, step) -> rank -> samples."""
    saved: dict[str, Saved] = field(default_factory=dict)
    began: dict[int, str] = field(default_factory=dict)
    """Generation -> the attempt from which its ranks began, "" for the beginning of the training."""
    problems: list[str] = field(default_factory=list)

    def note(self, generation: int, step: int, rank: int, samples: list[int]) -> None:
        """Note what a rank used in a step."""
        self.used.setdefault((generation, step), {})[rank] = samples

    def save(self, attempt: str, saved: Saved) -> None:
        """Keep the content of a rank's part; all ranks must have the same position."""
        if (first := self.saved.setdefault(attempt, saved)) != saved:
            self.problems.append(f"ranks saved {first} and {saved} in attempt {attempt}")

    def begin(self, generation: int, attempt: str) -> Position:
        """Return the position at which a rank begins in a generation."""
        if (first := self.began.setdefault(generation, attempt)) != attempt:
            self.problems.append(f"ranks of generation {generation} began from {first!r} and {attempt!r}")
        return self.saved[attempt].position if attempt else Position()

    def problem(self, attempt: str) -> str | None:
        """Return the problem with the samples of the steps that led to a commit, or None."""
        steps: list[list[int]] = []
        while attempt:
            generation, step = self.saved[attempt].generation, self.saved[attempt].step
            attempt = self.began[generation]
            first = self.saved[attempt].step if attempt else 0
            steps += (self._step(generation, number) for number in range(step, first, -1))
        for number, (samples, expected) in enumerate(zip(reversed(steps), undisturbed(), strict=False), 1):
            if samples != expected:
                return f"step {number} used the samples {samples}, and without faults {expected}"
        return None

    def _step(self, generation: int, step: int) -> list[int]:
        by_rank = self.used.get((generation, step), {})
        return [sample for rank in sorted(by_rank) for sample in by_rank[rank]]


def undisturbed() -> Iterator[list[int]]:
    """Yield the samples of each step of a training without faults."""
    epoch = 0
    while True:
        order = Order(LENGTH, seed=SEED, epoch=epoch)
        for begin in range(0, LENGTH, GLOBAL_BATCH):
            yield order.take(begin, begin + GLOBAL_BATCH)
        epoch += 1


class RankSamples:
    """One rank's samples in one generation."""

    def __init__(
        self, samples: Samples, *, generation: int, rank: int, world_size: int, attempt: str
    ) -> None:
        """`attempt` is the checkpoint from which the rank begins, "" for none."""
        self._samples = samples
        self._generation = generation
        self._rank = rank
        sampler = ElasticSampler(LENGTH, global_batch=GLOBAL_BATCH, most=MOST, seed=SEED)
        self._feed = ElasticFeed(sampler, rank, world_size, made_of=None, per_rank=0)
        self._position = samples.begin(generation, attempt)
        self._after = {self._position.step: self._position}
        self._batches = self._feed.epoch(self._position)

    def train(self, step: int) -> Position:
        """Use the samples up to `step`, unless that is done; return the position after it."""
        while self._position.step < step:
            self._next()
        return self._after[step]

    def save(self, attempt: str, step: int) -> None:
        """Save the position after `step`. A simulated save may come before its step: the step is then trained now."""
        self._samples.save(attempt, Saved(self._generation, step, self.train(step)))

    def _next(self) -> None:
        used: list[int] = []
        for fed in self._batches:
            used += fed.batch
            if fed.last:
                break
        else:
            assert not used, "a step was left unfinished"
            self._position = Position(
                step=self._position.step, epoch=self._position.epoch + 1, samples=self._position.samples
            )
            self._batches = self._feed.epoch(self._position)
            return
        self._position = self._position.next(fed.samples, batches=fed.batches)
        self._after[self._position.step] = self._position
        self._samples.note(self._generation, self._position.step, self._rank, used)
