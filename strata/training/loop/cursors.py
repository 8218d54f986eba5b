"""How far each shard of a dataset is: `Cursors` (PROTOCOLS 7.2).

A cursor belongs to the snapshot: it is captured in the trainer's thread together with the state, and
saved as text beside the position in each rank's manifest. The next world may give a shard to another
rank, so whoever restores looks at every rank's cursors, and of two of one shard takes the later one.

A rank saves what it has advanced itself; rank 0 saves what nobody has advanced since, too, so that
nothing of an earlier world is lost when a shard rests for one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from strata.client.api import arguments
from strata.documents.parsing import MANIFEST, json_object
from strata.errors import CheckpointError, InvalidArgument

CURSORS_KEY: Final = "cursors"
"""Where they stand, beside the position, in a checkpoint."""

Place = tuple[int, int]
"""(epoch, position in it)."""


class Cursors:
    """The positions in the shards of one dataset: samples, say, that completed steps have used.

    For the trainer's thread. What was advanced before a step was completed is saved with that step.
    """

    def __init__(self, known: Mapping[int, Place]) -> None:
        """`known`: where the checkpoint says that the shards are."""
        self._places = dict(known)
        self._advanced: set[int] = set()

    def position(self, shard: int, *, epoch: int = 0) -> int:
        """Return how far `shard` is in `epoch`; 0 where nobody has begun it there.

        `CheckpointError` when it is in a later epoch already: what was asked for is over.
        """
        shard, epoch = _shard(shard), _epoch(epoch)
        now, position = self._places.get(shard, (epoch, 0))
        if now > epoch:
            raise CheckpointError(
                f"shard {shard} is in epoch {now}, not in {epoch}",
                hint="pass over the epochs below run.epoch",
            )
        return position if now == epoch else 0

    def advance(self, shard: int, position: int, *, epoch: int = 0) -> None:
        """Say how far `shard` is with the step at hand; `InvalidArgument` when that would be backwards."""
        shard, epoch = _shard(shard), _epoch(epoch)
        place = epoch, arguments.integer("position", position, below=2**63)
        before = self._places.get(shard, (0, 0))
        if place < before:
            raise InvalidArgument(
                f"shard {shard} is at position {before[1]} of epoch {before[0]}, beyond {position} of {epoch}",
                hint="each epoch begins at 0, and epochs are counted by epoch=",
            )
        self._places[shard] = place
        self._advanced.add(shard)

    def saved(self, *, whole: bool) -> dict[str, list[int]]:
        """Return what a checkpoint holds: what was advanced here, or the `whole` of it."""
        shards = self._places if whole else self._advanced
        return {str(shard): list(self._places[shard]) for shard in sorted(shards)}


class CursorBook:
    """All cursors of one rank of one generation. `of_ranks` returns the text that each rank had saved."""

    def __init__(self, *, rank: int, own: str, of_ranks: Callable[[], Iterable[str]]) -> None:
        """`own` is the text that this rank had saved, "" for none."""
        self._rank = rank
        self._own = own
        self._of_ranks = of_ranks
        self._known: dict[str, dict[int, Place]] | None = None
        self._datasets: dict[str, Cursors] = {}

    def of(self, dataset: str) -> Cursors:
        """Return the cursors of a dataset. The first call reads what all ranks had saved."""
        if self._known is None:
            self._known = merged(self._of_ranks())
        if dataset not in self._datasets:
            self._datasets[dataset] = Cursors(self._known.get(dataset, {}))
        return self._datasets[dataset]

    def saved(self) -> str:
        """Return what this rank's part of a checkpoint holds."""
        if self._known is None:
            return self._own  # nobody has looked: as it was
        whole = self._rank == 0
        datasets = {name: cursors.saved(whole=whole) for name, cursors in self._datasets.items()}
        if whole:
            for name, places in self._known.items():
                datasets.setdefault(name, Cursors(places).saved(whole=True))
        return json.dumps(datasets, separators=(",", ":"), sort_keys=True) if datasets else ""


def merged(texts: Iterable[str]) -> dict[str, dict[int, Place]]:
    """Return the cursors of all datasets, of what each rank had saved: the later one of each shard."""
    known: dict[str, dict[int, Place]] = {}
    for text in texts:
        for dataset, places in _read(text).items():
            into = known.setdefault(dataset, {})
            for shard, place in places.items():
                into[shard] = max(place, into.get(shard, (0, 0)))
    return known


def _read(text: str) -> dict[str, dict[int, Place]]:
    if not text:
        return {}
    try:
        return {
            dataset: {int(shard): (int(epoch), int(position)) for shard, (epoch, position) in places.items()}
            for dataset, places in json_object(text, MANIFEST).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint's cursors cannot be read: {error}: {text[:80]!r}") from None


def _shard(shard: int) -> int:
    return arguments.integer("shard", shard, below=2**31, hint="the number of one of the dataset's files")


def _epoch(epoch: int) -> int:
    return arguments.integer("epoch", epoch, below=2**63)
