"""`StatefulFeed`: the batches of a torchdata StatefulDataLoader whose samples cannot be redistributed over ranks.

Over an iterable dataset, or with the program's own sampler, only the loader's state determines the rank's next samples.
So each rank saves its loader's state in its part of a checkpoint, and continues from it.

    state_dict() after `batches` batches of `epoch`  →  Snapshot  →  load_state_dict(), on the same rank

A checkpoint counts the batches of *complete* steps. The loader may have given further batches, if a save comes in
the middle of a step or the program left a loop. Then the checkpoint has the previous snapshot. After a restore, the
batches of complete steps that came after that snapshot are drawn again and dropped.

A loader state after the last batch of an epoch is ambiguous until the next batch is requested: it may mean the end of
that epoch or the start of the next. So after each snapshot the feed draws the next batch early. If there is one, it
is handed out next, and the snapshot does not include it. If there is none, the snapshot is taken again.

This module never imports torchdata: a program that has a torchdata loader has imported it.
"""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Self

from strata.checkpoint.snapshot import rng
from strata.checkpoint.snapshot.state import has_state
from strata.data.facts import DEFAULT
from strata.errors import ConfigError, InvalidArgument
from strata.training.loop.ordinary_feed import OrdinaryFeed
from strata.training.save.state import Position

KEPT_KEY: Final = "own"
"""The key of the rank's loader state among the loader's entries in a checkpoint."""
_TORCHDATA: Final = "torchdata.stateful_dataloader"
_MODULES: Final = ("torch.utils.data", "torch.utils.data.distributed", _TORCHDATA, f"{_TORCHDATA}.sampler")

log: Final = logging.getLogger("strata.training")


def types_named(*names: str) -> set[type]:
    """Return torch's and torchdata's own classes of these names, from imported modules only."""
    modules = [sys.modules[name] for name in _MODULES if name in sys.modules]
    return {getattr(module, name) for module in modules for name in names if hasattr(module, name)}


def is_stateful(loader: Any) -> bool:
    """Return whether `loader` is a StatefulDataLoader, or of a derived class."""
    return isinstance(loader, tuple(types_named("StatefulDataLoader")))


def check_no_state(loader: Any) -> None:
    """Raise `InvalidArgument` for an elastic StatefulDataLoader whose dataset has a `state_dict()`."""
    if is_stateful(loader) and has_state(loader.dataset):
        raise InvalidArgument(
            f"the map-style dataset {type(loader.dataset).__name__} has a state_dict() of its own, which would be"
            " lost: any rank may read any of its samples",
            hint="use torch.utils.data.DataLoader, and give the state to save to strata.init(state={…})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The `state` of one rank's loader after `batches` batches of `epoch`.

    `ended`: the epoch had no more batches; `sampler` is then the state of the loader's sampler, if it has one.
    `data_rank` is the data-parallel place of the rank.
    """

    epoch: int
    batches: int
    ended: bool
    state: Any
    sampler: Any = None
    data_rank: int | None = None


class Kept:
    """The newest snapshot of this rank's loaders in one generation; `loader` is None for a restored snapshot."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self.snapshot = snapshot
        self.loader: Any = None
        self.rest = _Rest(())
        """The remaining batches of the current epoch."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Return the snapshot of this rank's loader from a checkpoint's loader entries."""
        own = saved.get(KEPT_KEY)
        return cls(None if own is None else Snapshot(**own))

    def check(self, loader: Any, *, before: int | None, rank: int = 0, world_size: int) -> None:
        """Raise if `loader` cannot continue: `ConfigError` because of the world's size, else `InvalidArgument`."""
        restored = self.snapshot is not None and self.loader is None
        if restored and before != world_size:
            raise ConfigError(
                f"{before} ranks saved the state of a StatefulDataLoader each, and there are {world_size} ranks now:"
                " only a rank that saved one can go on with it",
                hint=f"train on with {before} ranks (--min-workers and --max-workers, or the number of slots), or"
                " start a new job. A map-style dataset with torch's own samplers goes on in any world",
            )
        if restored and self.snapshot is not None and self.snapshot.data_rank not in {None, rank}:
            raise ConfigError(
                f"this rank saved a StatefulDataLoader's state as data-parallel rank {self.snapshot.data_rank}, and is"
                f" {rank} now",
                hint="train on with the mesh of before. A map-style dataset goes on with any mesh",
            )
        if world_size > 1 and _is_whole(_sampler(loader)):
            raise ConfigError(
                f"each of {world_size} ranks would read every sample: the {type(_sampler(loader)).__name__} of a"
                " StatefulDataLoader without a batch size, or of a class derived from it, is not divided",
                hint="give it torch's DistributedSampler or torchdata's StatefulDistributedSampler, or use"
                " StatefulDataLoader itself with a batch_size",
            )
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise InvalidArgument(
                "a StatefulDataLoader with in_order=False does not know which samples it has given",
                hint="leave in_order out",
            )
        if loader.persistent_workers:
            raise InvalidArgument(
                "a StatefulDataLoader with persistent_workers=True skips samples when it continues after the end"
                " of an epoch",
                hint="leave persistent_workers out",
            )
        if not _goes_on(loader):
            raise InvalidArgument(
                f"the sampler {type(_sampler(loader)).__name__} of a StatefulDataLoader has no state_dict(), so a"
                " restart would give other samples",
                hint="give the sampler state_dict() and load_state_dict(), or use one of torch's own over the"
                " whole dataset (shuffle=True), which goes on in any world",
            )


def _sampler(loader: Any) -> Any:
    """Return the sampler or batch sampler that determines the order of a map-style dataset's samples."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) in _of_torchdata("BatchSampler") else batches


def _is_whole(sampler: Any) -> bool:
    """Return whether this is a sampler of torch or torchdata that yields every sample on every rank."""
    if type(sampler) in types_named("SequentialSampler"):
        return True
    if type(sampler) in types_named("RandomSampler"):
        return not sampler.replacement and bool(sampler.num_samples == len(sampler.data_source))
    return False


def _of_torchdata(name: str) -> set[type]:
    """Return torchdata's class of this name, not torch's: a StatefulDataLoader saves only the state of torchdata's."""
    return types_named(name) - {getattr(sys.modules["torch.utils.data"], name)}


def _goes_on(loader: Any) -> bool:
    """Return whether the loader's state determines its next samples."""
    if isinstance(loader.dataset, tuple(types_named("IterableDataset"))):
        return True  # the loader restores the dataset's state, or reads the dataset again up to its position
    sampler = _sampler(loader)
    computed = types_named("SequentialSampler", "DistributedSampler", "StatefulDistributedSampler")
    return type(sampler) in computed | _of_torchdata("RandomSampler") or has_state(sampler)


class StatefulFeed(OrdinaryFeed):
    """Steps of a StatefulDataLoader, which continues from its own state; see the module."""

    def __init__(
        self,
        loader: Any,
        accumulate: int,
        world_size: int,
        *,
        kept: Kept,
        rank: int = 0,
        before: int | None = None,
        length: int | None = None,
        most: int | None = None,
        dataset: str = DEFAULT,
        exact: bool = True,
    ) -> None:
        """`kept` is shared by all feeds of a generation; for the other arguments see `OrdinaryFeed`."""
        super().__init__(
            loader,
            accumulate,
            world_size,
            before=before,
            length=length,
            most=most,
            dataset=dataset,
            exact=exact,
        )
        self._stateful = loader
        self._kept = kept
        self._rank = rank
        self._drawn: tuple[int, int] | None = None
        """The epoch, and the number of its batches handed out."""

    def _left(self, position: Position) -> Iterator[Any]:
        random = rng.capture()  # a loader draws from torch's generator when an epoch begins
        begun = self._open(position.epoch)
        drawn = self._counted(position.epoch, begun)
        self._pass_over(drawn, position.epoch_batches - begun, position)
        if position.epoch_batches:
            rng.restore(random)
        most = None if self._most is None else max(0, self._most - position.epoch_batches)
        return islice(drawn, most)

    def _open(self, epoch: int) -> int:
        """Begin to read the rest of `epoch` from the newest snapshot; return the number of batches before it."""
        loader, kept = self._stateful, self._kept
        known, restored = kept.snapshot, kept.loader is None
        if self._drawn is not None and kept.loader is not loader:
            raise InvalidArgument(
                "two StatefulDataLoaders take turns, and a checkpoint holds the state of the newest only",
                hint="make a new loader for each epoch, or read both datasets with one loader",
            )
        back = kept.loader is loader and (
            kept.rest.drew_early or (known is not None and known.epoch == epoch)
        )
        if known is not None and (restored or back):
            loader.load_state_dict(copy.deepcopy(known.state))
            kept.loader = loader
            if known.epoch == epoch and not known.ended:
                kept.rest = _Rest(loader)
                return known.batches
            self._pass_end(known)
            if known.epoch == epoch:
                kept.rest = _Rest((), ended=True)
                return known.batches
        kept.rest = _Rest(loader)
        self._take(epoch, 0)
        return 0

    def _pass_end(self, known: Snapshot) -> None:
        """Make the loader apply its restored state, so that the next iteration begins a new epoch.

        The loader may draw from torch's generator meanwhile. So the random states are put back afterwards, and the
        next epoch draws as in a run without a restart.
        """
        loader, random = self._stateful, rng.capture()
        if known.ended:
            loader.state_dict()
            sampler = _sampler(loader)
            if known.sampler is not None and pickle.dumps(sampler.state_dict()) != pickle.dumps(
                known.sampler
            ):
                # the loader has drawn indices of the next epoch for its workers, and drops them: reset the sampler
                sampler.load_state_dict(copy.deepcopy(known.sampler))
        else:
            iter(loader)  # drops the rest of the epoch that the program left
        rng.restore(random)

    def _counted(self, epoch: int, begun: int) -> Iterator[Any]:
        self._drawn = epoch, begun
        for batch in self._kept.rest:
            begun += 1
            self._drawn = epoch, begun
            yield batch

    def _take(self, epoch: int, batches: int) -> None:
        """Take a snapshot of the loader's current state."""
        loader, ended = self._stateful, self._kept.rest.ended
        sampler = _sampler(loader)
        self._kept.snapshot = Snapshot(
            epoch=epoch,
            batches=batches,
            ended=ended,
            state=copy.deepcopy(loader.state_dict()),
            sampler=copy.deepcopy(sampler.state_dict()) if ended and has_state(sampler) else None,
            data_rank=self._rank,
        )
        self._kept.loader = loader

    def facts(self, position: Position) -> dict[str, Any]:
        rest = self._kept.rest
        if self._drawn == (position.epoch, position.epoch_batches) and not rest.drew_early:
            self._take(*self._drawn)
            if not rest.ended and self._drawn[1] != self._most and not rest.draw():
                self._take(*self._drawn)
        facts = super().facts(position)
        snapshot = self._kept.snapshot
        if snapshot is None:
            return facts
        return {**facts, KEPT_KEY: {name: getattr(snapshot, name) for name in Snapshot.__slots__}}


class _Rest:
    """The remaining batches of an epoch; the next one may be drawn early.

    A loader may draw from the random states. So after an early draw the earlier random states are put back until
    the batch is handed out.
    """

    def __init__(self, batches: Iterable[Any], *, ended: bool = False) -> None:
        self._batches = iter(batches)
        self._early: list[tuple[Any, dict[str, Any]]] = []
        self.ended = ended
        """Whether the loader has ended."""

    @property
    def drew_early(self) -> bool:
        """Whether the loader has given a batch that is not handed out yet."""
        return bool(self._early)

    def draw(self) -> bool:
        """Draw the next batch early; return whether there is one."""
        random = rng.capture()
        for batch in islice(self._batches, 1):
            self._early.append((batch, rng.capture()))
            rng.restore(random)
        self.ended = not self._early
        return not self.ended

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._early:
            batch, random = self._early.pop()
            rng.restore(random)
            return batch
        if not self.ended:
            for batch in self._batches:
                return batch
            self.ended = True
        raise StopIteration
