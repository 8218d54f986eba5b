"""`Feed`: turns a data loader into the batches of optimizer steps.

There are three kinds of loaders:

*elastic*: an `ElasticSampler`, or a torch DataLoader (or torchdata StatefulDataLoader) over a dataset of known
length, with a sampler of torch or one that draws the same indices on all ranks. Strata assigns the samples. A step
has the same samples in any world, and a restart continues with the next sample.

*stateful*: any other StatefulDataLoader. Each rank saves and restores its loader's state. The training continues in a
world of the same size, and is refused in a world of another size.

*ordinary*: any other loader or iterable. A restart draws and drops the batches that were trained on before. Limit: the
training then continues with the next batch only if the loader gives the same batches in the same order in each run. A
DataLoader is refused in a world of another size, since each rank may have read its own part.

If stateful or ordinary loaders differ in length between ranks, all ranks end an epoch after the smallest number of
batches: a rank with more batches would wait alone in the collectives of its next step. Otherwise an epoch ends when
the loader ends, since a length may be an estimate.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from strata.checkpoint.snapshot.state import has_state
from strata.data.facts import DEFAULT, DatasetFacts
from strata.data.place import DataPlace
from strata.data.sampler import DrawnSampler, ElasticSampler, check_split
from strata.errors import ConfigError, DatasetMismatch, InvalidArgument
from strata.training.loop.drawn_indices import Draw, is_repeatable
from strata.training.loop.elastic_feed import ElasticFeed
from strata.training.loop.ordinary_feed import Fed, OrdinaryFeed
from strata.training.loop.stateful_feed import Kept, StatefulFeed, check_no_state, is_stateful, types_named
from strata.training.loop.virtual_ranks import VirtualFeed
from strata.training.save.state import Position

Loader = Iterable[Any] | ElasticSampler
"""The loaders that `run.steps` accepts."""

log: Final = logging.getLogger("strata.training")


class Feed(Protocol):
    """The batches of one loader, epoch by epoch."""

    def epoch(self, position: Position) -> Iterator[Fed]:
        """Yield the remaining batches of the epoch that `position` is in."""
        ...

    def described(self, epoch: int) -> DatasetFacts:
        """Return what the position in `epoch` means: the dataset and the definition of its order."""
        ...

    def facts(self, position: Position) -> dict[str, Any]:
        """Return the loader's entries in a checkpoint of `position`."""
        ...

    def size(self) -> int | None:
        """Return the number of this rank's batches in an epoch, None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Met:
    """What the ranks learned from each other about their loaders.

    All ranks end an epoch after `shortest` batches; None: each rank ends an epoch when its own loader ends. `same`:
    the ranks' descriptions of the order are equal.
    """

    shortest: int | None = None
    same: bool = True


Meet = Callable[[int | None, str, bool], Met]
"""Takes this rank's number of batches, its description of the order, and whether the answer decides what it trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """Makes feeds from this rank's world, the settings, and the loader's entries `saved` in the checkpoint.

    `rank` and `world_size` are this rank's data-parallel place. With `exact` a loader whose position would not be
    exact in this world is refused. `virtual` is the number of virtual ranks, 0 for none.
    """

    rank: int
    world_size: int
    global_batch: int | None
    seed: int
    uneven: bool
    saved: Mapping[str, Any]
    exact: bool = True
    virtual: int = 0
    has_peers: bool = False
    """Whether several ranks have one data-parallel place."""
    meet: Meet = lambda batches, order, decides: Met()
    kept: Kept = field(init=False)
    """The saved state of this rank's StatefulDataLoader."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", Kept.of(self.saved))

    def feed(self, loader: Loader, accumulate: int, *, dataset: str = DEFAULT, fixed: bool = False) -> Feed:
        """Return the feed of `loader`; `ConfigError` if its batches cannot be split in this world.

        `fixed`: a step has `accumulate` batches in every world; else their number changes, and their size does not.
        `DatasetMismatch` if Strata assigns the samples, and the ranks' datasets or orders differ.
        """
        if self.virtual and (accumulate != 1 or getattr(loader, "most", None) is not None):
            raise InvalidArgument(
                "with virtual ranks each micro-batch is one batch", hint="leave accumulate and `most` out"
            )
        sampler, made_of = self._sampler(loader, accumulate, fixed=fixed)
        if sampler is not None and fixed:
            self._check_fixed(sampler, accumulate)
        described = sampler.described(0, dataset=dataset) if sampler is not None else None
        length = _length(loader)
        is_drawn = isinstance(sampler, DrawnSampler)
        if described is not None and self.has_peers and not is_drawn:
            met = Met()  # a peer of another pipeline stage may have no loader; each save compares the data
        else:
            order = described.digest() if described is not None else f"loader {dataset}"
            met = self.meet(length, order, described is None or is_drawn)
        if sampler is not None and met.same:
            return self._elastic(sampler, made_of, accumulate, dataset=dataset)
        if sampler is not None and not is_drawn:
            raise DatasetMismatch(
                f"dataset {dataset!r}: the ranks have different datasets, orders or seeds; this rank has {described}",
                hint="give all ranks the same dataset, seed and sampler",
            )
        if self.virtual:
            raise ConfigError(
                f"virtual ranks need a loader whose samples Strata assigns, not a {type(loader).__name__}",
                hint="use a DataLoader over a dataset with a length, or an ElasticSampler (docs/data.md)",
            )
        # a sampler that draws other indices on each rank makes an ordinary or a stateful loader
        given: Any = loader
        options: dict[str, Any] = {
            "dataset": dataset,
            "before": self.saved.get("world_size"),
            "length": length,
            "most": met.shortest,
            # another iterable may be only a counter: the program knows what its items mean in another world
            "exact": self.exact and isinstance(given, tuple(types_named("DataLoader"))),
        }
        if not is_stateful(given):
            return OrdinaryFeed(given, accumulate, self.world_size, **options)
        self.kept.check(given, before=options["before"], rank=self.rank, world_size=self.world_size)
        return StatefulFeed(given, accumulate, self.world_size, rank=self.rank, kept=self.kept, **options)

    def _check_fixed(self, sampler: ElasticSampler, accumulate: int) -> None:
        """Raise `ConfigError` unless every rank's share of a whole step can be `accumulate` batches."""
        share = sampler.global_batch // self.world_size
        if share < accumulate or (not sampler.uneven and share % accumulate):
            equal = "" if sampler.uneven else " of equal size"
            raise ConfigError(
                f"a global batch of {sampler.global_batch} samples cannot be {accumulate} batches{equal} on each of"
                f" {self.world_size} ranks",
                hint="accumulate another number of batches, or train with another number of ranks or global batch",
            )

    def _sampler(
        self, loader: Loader, accumulate: int, *, fixed: bool
    ) -> tuple[ElasticSampler | None, tuple[Any, Any] | None]:
        """Return the sampler by which Strata can assign the samples of `loader`, and the loader to rebuild with torch.

        None if only the loader itself determines its samples.
        """
        if isinstance(loader, ElasticSampler):
            if accumulate != 1:
                raise InvalidArgument(
                    "an ElasticSampler itself sets how many batches make a step",
                    hint="leave accumulate out, and give the sampler `most`",
                )
            return loader, None
        torch: Any = sys.modules.get("torch")
        if torch is None or not _is_map_style(torch, loader):
            return None, None
        found: Any = loader  # a DataLoader
        settings = self._settings(found, accumulate, fixed=fixed)
        if (shuffle := _shuffles(found)) is not None:
            check_no_state(found)
            seed = int(getattr(found.sampler, "seed", self.seed))
            return ElasticSampler(len(found.dataset), seed=seed, shuffle=shuffle, **settings), (torch, found)
        if is_stateful(found) and (has_state(found.sampler) or has_state(found.dataset)):
            return None, None
        length = _length(found.sampler)
        if not length:
            return None, None
        draw = Draw(torch, found.sampler, length, seed=self.seed)
        if not is_repeatable(draw, length):
            return None, None
        return DrawnSampler(draw, length, name=type(found.sampler).__name__, **settings), (torch, found)

    def _settings(self, loader: Any, accumulate: int, *, fixed: bool) -> dict[str, Any]:
        """Return the settings that an elastic sampler takes from a DataLoader."""
        fingerprint = getattr(loader.dataset, "fingerprint", "")
        return {
            "global_batch": self._global_batch(_per_rank(loader, accumulate)),
            "most": None if accumulate == 1 or fixed else int(loader.batch_size),
            "count": accumulate if fixed else None,
            "drop_last": bool(loader.drop_last),
            "uneven": self.uneven,
            "fingerprint": fingerprint if isinstance(fingerprint, str) else "",
        }

    def _elastic(
        self, sampler: ElasticSampler, made_of: tuple[Any, Any] | None, accumulate: int, *, dataset: str
    ) -> Feed:
        per_rank = _per_rank(made_of[1], accumulate) if made_of is not None else 0
        size = self.virtual or self.world_size
        check_split(sampler.global_batch, size, uneven=sampler.uneven)
        left_out = sampler.left_out(size)
        if left_out and not sampler.drop_last and self.rank == 0:
            log.warning("%d samples of each epoch are left out: fewer than there are ranks", left_out)
        if self.virtual:
            return VirtualFeed(
                sampler,
                DataPlace(self.rank, self.world_size),
                virtual=self.virtual,
                made_of=made_of,
                per_rank=per_rank,
                dataset=dataset,
            )
        return ElasticFeed(
            sampler, self.rank, self.world_size, made_of=made_of, per_rank=per_rank, dataset=dataset
        )

    def _global_batch(self, per_rank: int) -> int:
        """Return the number of samples of a step: the saved number, unless the user changed the samples per rank."""
        if self.global_batch is not None:
            return self.global_batch
        if self.saved.get("per_rank") == per_rank and self.saved.get("virtual_ranks", 0) == self.virtual:
            return int(self.saved["global_batch"])
        return per_rank * (self.virtual or self.world_size)


def _length(loader: object) -> int | None:
    """Return the number of batches of an epoch, or None if the loader has no length."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader over a dataset without a length
        return None


def _per_rank(loader: Any, accumulate: int) -> int:
    return int(loader.batch_size) * accumulate


def _is_map_style(torch: Any, loader: Any) -> bool:
    """Return whether this is a DataLoader over a dataset of known length, whose sampler gives single indices."""
    if type(loader) not in types_named("DataLoader", "StatefulDataLoader") or loader.batch_size is None:
        return False
    if type(loader.batch_sampler) not in types_named("BatchSampler"):
        return False
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    return isinstance(loader.dataset, Sized) and not iterable


def _shuffles(loader: Any) -> bool | None:
    """Return whether a map-style DataLoader with one of torch's own samplers shuffles; None for any other sampler."""
    sampler = loader.sampler
    if type(sampler) in types_named("SequentialSampler"):
        return False
    if type(sampler) in types_named("RandomSampler"):
        whole = not sampler.replacement and sampler.num_samples == len(loader.dataset)
        return True if whole else None
    if type(sampler) in types_named("DistributedSampler", "StatefulDistributedSampler"):
        return bool(sampler.shuffle)
    return None
