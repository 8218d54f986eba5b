"""`Feed`: turns a data loader into the batches of optimizer steps.

There are three kinds of loaders:

*elastic*: an `ElasticSampler`, or a torch DataLoader (or torchdata StatefulDataLoader) over a dataset of known
length with one of torch's own samplers. A step has the same samples in any world, and a restart continues with the
next sample. The DataLoader itself is not used: Strata makes a new DataLoader with the same dataset and number of
workers, which takes its indices from an `ElasticSampler`.

*stateful*: any other StatefulDataLoader. Each rank saves and restores its loader's state. The training continues in a
world of the same size, and is refused in a world of another size.

*ordinary*: any other loader. A restart draws and drops the batches that were trained on before. Limit: the training
then continues with the next batch only if the loader gives the same batches in the same order in each run, and the
world has the same size as before.

If stateful or ordinary loaders differ in length between ranks, all ranks end an epoch after the smallest number of
batches: a rank with more batches would wait alone in the collectives of its next step. Otherwise an epoch ends when
the loader ends, since a length may be an estimate.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from strata.data.order import mix
from strata.data.sampler import ElasticSampler, check_split
from strata.errors import InvalidArgument
from strata.training.loop.ordinary_feed import Fed, OrdinaryFeed
from strata.training.loop.stateful_feed import Kept, StatefulFeed, check_no_state, is_stateful, types_named
from strata.training.save.state import Position
from strata.training.stop.shield import Shielded, starting_children

Loader = Iterable[Any] | ElasticSampler
"""The loaders that `run.steps` accepts."""

log: Final = logging.getLogger("strata.training")


class Feed(Protocol):
    """The batches of one loader, epoch by epoch."""

    def epoch(self, position: Position) -> Iterator[Fed]:
        """Yield the remaining batches of the epoch that `position` is in."""
        ...

    def facts(self, position: Position) -> dict[str, Any]:
        """Return the loader's entries in a checkpoint of `position`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """Makes feeds from this rank's world, the settings, and the loader's entries `saved` in the checkpoint.

    `shortest` takes this rank's number of batches, and returns the number after which all ranks end an epoch; None:
    each rank ends an epoch when its own loader ends.
    """

    rank: int
    world_size: int
    global_batch: int | None
    seed: int
    uneven: bool
    saved: Mapping[str, Any]
    shortest: Callable[[int | None], int | None] = lambda batches: None
    kept: Kept = field(init=False)
    """The saved state of this rank's StatefulDataLoader."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", Kept.of(self.saved))

    def feed(self, loader: Loader, accumulate: int) -> Feed:
        """Return the feed of `loader`; `ConfigError` if its batches cannot be split in this world."""
        if isinstance(loader, ElasticSampler):
            if accumulate != 1:
                raise InvalidArgument(
                    "an ElasticSampler itself sets how many batches make a step",
                    hint="leave accumulate out, and give the sampler `most`",
                )
            return self._elastic(loader, None, per_rank=0)
        torch = sys.modules.get("torch")
        if torch is not None and (shuffle := _shuffles(torch, loader)) is not None:
            check_no_state(loader)
            return self._torch(torch, loader, accumulate, shuffle=shuffle)
        before = self.saved.get("world_size")
        if is_stateful(loader):
            self.kept.check(loader, before=before, world_size=self.world_size)
        length = _length(loader)
        most = self.shortest(length)
        if is_stateful(loader):
            return StatefulFeed(
                loader, accumulate, self.world_size, kept=self.kept, before=before, length=length, most=most
            )
        return OrdinaryFeed(loader, accumulate, self.world_size, before=before, length=length, most=most)

    def _torch(self, torch: Any, loader: Any, accumulate: int, *, shuffle: bool) -> Feed:
        per_rank = int(loader.batch_size) * accumulate
        sampler = ElasticSampler(
            len(loader.dataset),
            global_batch=self._global_batch(per_rank),
            most=None if accumulate == 1 else int(loader.batch_size),
            seed=int(getattr(loader.sampler, "seed", self.seed)),
            shuffle=shuffle,
            drop_last=bool(loader.drop_last),
            uneven=self.uneven,
        )
        return self._elastic(sampler, (torch, loader), per_rank=per_rank)

    def _elastic(self, sampler: ElasticSampler, made_of: tuple[Any, Any] | None, *, per_rank: int) -> Feed:
        check_split(sampler.global_batch, self.world_size, uneven=sampler.uneven)
        before, now = self.saved.get("length"), sampler.length
        if before is not None and before != now:
            log.warning("the dataset has %d samples, and had %d when this was saved", now, before)
        left_out = sampler.left_out(self.world_size)
        if left_out and not sampler.drop_last and self.rank == 0:
            log.warning("%d samples of each epoch are left out: fewer than there are ranks", left_out)
        return ElasticFeed(sampler, self.rank, self.world_size, made_of=made_of, per_rank=per_rank)

    def _global_batch(self, per_rank: int) -> int:
        """Return the number of samples of a step: the saved number, unless the user changed the samples per rank."""
        if self.global_batch is not None:
            return self.global_batch
        if self.saved.get("per_rank") == per_rank:
            return int(self.saved["global_batch"])
        return per_rank * self.world_size


class ElasticFeed:
    """Steps of an `ElasticSampler`; see the module."""

    def __init__(
        self,
        sampler: ElasticSampler,
        rank: int,
        world_size: int,
        *,
        made_of: tuple[Any, Any] | None,
        per_rank: int,
    ) -> None:
        """`made_of` is torch and the loader to copy the settings from; with None the feed yields the indices."""
        self.sampler = sampler
        self._rank = rank
        self._world_size = world_size
        self._per_rank = per_rank
        self._indices = _Indices()
        self._loader: Any = None
        if made_of is not None:
            torch, loader = made_of
            self._loader = _rebuilt(torch, loader, self._indices)

    def epoch(self, position: Position) -> Iterator[Fed]:
        epoch, done = position.epoch, position.epoch_samples
        rank, size = self._rank, self._world_size
        self._indices.now = lambda: self.sampler.indices(epoch, rank, size, done=done)
        batches: Iterable[Any] = self._indices
        if self._loader is not None:
            # the workers' seed differs in each epoch, and is drawn from no random generator of the program
            seed = mix(mix(mix(self.sampler.seed) + epoch) + (rank << 40) + done)
            self._loader.generator.manual_seed(seed >> 1)
            with starting_children(spawned=_spawns(self._loader)):
                batches = iter(self._loader)
        count = 0
        for batch, piece in zip(batches, self.sampler.pieces(rank, size, done=done), strict=True):
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

    def facts(self, position: Position) -> dict[str, Any]:
        return {**self.sampler.facts(), "per_rank": self._per_rank}


def _length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches of an epoch, or None if the loader has no length."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader over a dataset without a length
        return None


class _Indices:
    """The batch sampler of a DataLoader that is kept, with its workers, from epoch to epoch."""

    def __init__(self) -> None:
        self.now: Any = lambda: iter(())

    def __iter__(self) -> Iterator[list[int]]:
        indices: Iterator[list[int]] = self.now()
        return indices


def _shuffles(torch: Any, loader: Any) -> bool | None:
    """Return whether a DataLoader with one of torch's own samplers shuffles; None for any other loader."""
    if type(loader) not in types_named("DataLoader", "StatefulDataLoader") or loader.batch_size is None:
        return None
    if type(loader.batch_sampler) not in types_named("BatchSampler"):
        return None
    if isinstance(loader.dataset, torch.utils.data.IterableDataset) or not isinstance(loader.dataset, Sized):
        return None
    sampler = loader.sampler
    if type(sampler) in types_named("SequentialSampler"):
        return False
    if type(sampler) in types_named("RandomSampler"):
        whole = not sampler.replacement and sampler.num_samples == len(loader.dataset)
        return True if whole else None
    if type(sampler) in types_named("DistributedSampler", "StatefulDistributedSampler"):
        return bool(sampler.shuffle)
    return None


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
