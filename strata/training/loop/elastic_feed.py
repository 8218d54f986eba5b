"""`ElasticFeed`: the batches of a loader whose samples Strata assigns to the ranks.

The program's DataLoader itself is not used: Strata makes a new one with the same dataset and number of workers, which
takes its indices from an `ElasticSampler`. The sampler draws ahead of the training as far as the workers prefetch;
only completed steps move the position.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from itertools import tee
from typing import Any, Final

from strata.data.facts import DEFAULT, DatasetFacts
from strata.data.order import mix
from strata.data.sampler import ElasticSampler, Piece
from strata.training.loop.ordinary_feed import Fed
from strata.training.save.state import Position
from strata.training.stop.shield import Shielded, starting_children


class ElasticFeed:
    """Steps of an `ElasticSampler`, for the data-parallel place `rank` of `world_size`."""

    def __init__(
        self,
        sampler: ElasticSampler,
        rank: int,
        world_size: int,
        *,
        made_of: tuple[Any, Any] | None,
        per_rank: int,
        dataset: str = DEFAULT,
    ) -> None:
        """`made_of` is torch and the loader to copy the settings from; with None the feed yields the indices."""
        self.sampler = sampler
        self._rank = rank
        self._world_size = world_size
        self._per_rank = per_rank
        self._dataset = dataset
        self._indices = _Indices()
        self._loader: Any = None
        if made_of is not None:
            torch, loader = made_of
            self._loader = _rebuilt(torch, loader, self._indices)

    def pieces(self, done: int) -> Iterator[Piece]:
        """Yield this rank's pieces of the rest of an epoch."""
        return self.sampler.pieces(self._rank, self._world_size, done=done)

    def batches(
        self, epoch: int, pieces: Iterable[Piece], drawn: Iterator[Any]
    ) -> Iterator[tuple[Any, Piece]]:
        """Yield each piece with its batch."""
        return zip(drawn, pieces, strict=True)

    def epoch(self, position: Position) -> Iterator[Fed]:
        epoch, done = position.epoch, position.epoch_samples
        order = self.sampler.order(epoch)
        pieces, ahead = tee(self.pieces(done))
        self._indices.now = lambda: order.takes((piece.begin, piece.end) for piece in ahead)
        drawn: Iterable[Any] = self._indices
        if self._loader is not None:
            # the workers' seed differs in each epoch, and is drawn from no random generator of the program
            seed = mix(mix(mix(self.sampler.seed) + epoch) + (self._rank << 40) + done)
            self._loader.generator.manual_seed(seed >> 1)
            with starting_children(spawned=_spawns(self._loader)):
                drawn = iter(self._loader)
        count = 0
        for batch, piece in self.batches(epoch, pieces, iter(drawn)):
            count += 1
            yield Fed(
                batch=batch,
                last=piece.last,
                samples=piece.step_samples,
                batches=count,
                weight=piece.weight,
            )
            if piece.last:
                count = 0

    def described(self, epoch: int) -> DatasetFacts:
        return self.sampler.described(epoch, dataset=self._dataset)

    def size(self) -> int | None:
        return self.sampler.pieces_an_epoch(self._world_size)

    def facts(self, position: Position) -> dict[str, Any]:
        return {**self.sampler.facts(), "per_rank": self._per_rank}


class _Indices:
    """The batch sampler of a DataLoader that is kept, with its workers, from epoch to epoch."""

    def __init__(self) -> None:
        self.now: Any = lambda: iter(())

    def __iter__(self) -> Iterator[list[int]]:
        indices: Iterator[list[int]] = self.now()
        return indices


_CARRIED: Final = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def _spawns(loader: Any) -> bool:
    """Return whether the workers of this DataLoader are spawned, not forked."""
    if not loader.num_workers:
        return False
    context = loader.multiprocessing_context or multiprocessing
    return bool(context.get_start_method() != "fork")


def _rebuilt(torch: Any, loader: Any, indices: _Indices) -> Any:
    """Return a DataLoader like `loader` that takes its samples from `indices`."""
    settings = {name: getattr(loader, name) for name in _CARRIED if getattr(loader, name, None)}
    if loader.num_workers:
        settings["worker_init_fn"] = Shielded(loader.worker_init_fn)
    return torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=indices, generator=torch.Generator(), **settings
    )
