"""`Draw`: what a torch sampler draws for an epoch, as a function of the epoch alone.

A sampler such as `WeightedRandomSampler` draws from torch's random generator, or from a generator of its own. So each
draw runs with all random generators seeded by the epoch, and their states are put back afterwards. Every process then
draws the same indices for an epoch, without the epochs before. A sampler that keeps other state from draw to draw (a
generator of NumPy's own, say) draws other indices each time: `is_repeatable` finds this out by drawing twice.
"""

from __future__ import annotations

import copy
import operator
from array import array
from collections.abc import Iterable
from itertools import islice
from typing import Any

from strata.checkpoint.snapshot import rng
from strata.data.order import mix


class Draw:
    """Returns the indices that `sampler` draws for an epoch with this `seed`; at most `length + 1` of them.

    The sampler itself stays as it is: a copy draws.
    """

    def __init__(self, torch: Any, sampler: Any, length: int, *, seed: int) -> None:
        self._torch = torch
        self._sampler = sampler
        self._most = length + 1
        generator: Any = getattr(sampler, "generator", None)
        self._generator = generator
        self._has_generator = isinstance(self._generator, torch.Generator)
        self._seed = int(generator.initial_seed()) if self._has_generator else seed

    def __call__(self, epoch: int) -> array[int]:
        return self._drawn(copy.copy(self._sampler), epoch)

    def repeated(self, epoch: int) -> tuple[array[int], array[int]]:
        """Return what one copy draws for an epoch, twice in a row."""
        sampler = copy.copy(self._sampler)
        return self._drawn(sampler, epoch), self._drawn(sampler, epoch)

    def _drawn(self, sampler: Any, epoch: int) -> array[int]:
        torch = self._torch
        seed = mix(mix(self._seed) + epoch) >> 1
        before = rng.capture()
        try:
            rng.seed(seed)
            if self._has_generator:
                sampler.generator = torch.Generator(device=self._generator.device).manual_seed(seed)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            return array("q", map(operator.index, islice(_plain(sampler), self._most)))
        finally:
            rng.restore(before)


def is_repeatable(draw: Draw, length: int) -> bool:
    """Return whether two draws for the same epoch give the same indices, and two epochs have `length` of them."""
    try:
        first, again = draw.repeated(0)
        return len(first) == len(draw(1)) == length and first == again
    except (TypeError, OverflowError, copy.Error):  # a sampler of keys, not of indices
        return False


def _plain(sampler: Iterable[Any]) -> Iterable[Any]:
    for index in sampler:
        yield index.item() if hasattr(index, "item") else index
