"""`Cursors`: the read position in each shard of a dataset (PROTOCOLS 7.2).

Cursors are part of the snapshot: the trainer's thread captures them together with the state, and they are saved as
text beside the position in each rank's manifest. The next world may assign a shard to another rank. So a restoring
rank reads every rank's cursors, and takes the later of two cursors of one shard. A rank saves the cursors that it has
advanced. Rank 0 also saves the cursors that no rank has advanced since the restore: otherwise the cursor of a shard
that nobody reads in one world would be lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from strata.client.api import arguments
from strata.documents.parsing import MANIFEST, json_object
from strata.errors import CheckpointError, InvalidArgument

CURSORS_KEY: Final = "cursors"
"""The key of the cursors in a checkpoint, beside the position."""

Place = tuple[int, int]
"""(epoch, position in that epoch)."""


class Cursors:
    """The position in each shard of one dataset up to which completed steps have used it, for example in samples.

    For the trainer's thread. A cursor that is advanced before a step completes is saved with that step.
    """

    def __init__(self, known: Mapping[int, Place]) -> None:
        """`known` holds the positions from the checkpoint."""
        self._places = dict(known)
        self._advanced: set[int] = set()

    def position(self, shard: int, *, epoch: int = 0) -> int:
        """Return the position of `shard` in `epoch`; 0 if no rank has begun it in that epoch.

        `CheckpointError` if the shard is in a later epoch already.
        """
        shard, epoch = _shard(shard), _epoch(epoch)
        now, position = self._places.get(shard, (epoch, 0))
        if now > epoch:
            raise CheckpointError(
                f"shard {shard} is in epoch {now}, not in {epoch}",
                hint="skip the epochs below run.epoch",
            )
        return position if now == epoch else 0

    def advance(self, shard: int, position: int, *, epoch: int = 0) -> None:
        """Set the position of `shard` after the current step; `InvalidArgument` if that moves it backwards."""
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
        """Return the cursors to save: the cursors advanced on this rank, or all if `whole`."""
        shards = self._places if whole else self._advanced
        return {str(shard): list(self._places[shard]) for shard in sorted(shards)}


class CursorBook:
    """All cursors of one rank in one generation. `of_ranks` returns the text that each rank saved."""

    def __init__(self, *, rank: int, own: str, of_ranks: Callable[[], Iterable[str]]) -> None:
        """`own` is the text that this rank saved, "" for none."""
        self._rank = rank
        self._own = own
        self._of_ranks = of_ranks
        self._known: dict[str, dict[int, Place]] | None = None
        self._datasets: dict[str, Cursors] = {}

    def of(self, dataset: str) -> Cursors:
        """Return the cursors of a dataset. The first call reads the saved cursors of all ranks."""
        if self._known is None:
            self._known = merged(self._of_ranks())
        if dataset not in self._datasets:
            self._datasets[dataset] = Cursors(self._known.get(dataset, {}))
        return self._datasets[dataset]

    def saved(self) -> str:
        """Return the cursors as text for this rank's part of a checkpoint."""
        if self._known is None:
            return self._own  # no cursor was read or advanced: save the text unchanged
        whole = self._rank == 0
        datasets = {name: cursors.saved(whole=whole) for name, cursors in self._datasets.items()}
        if whole:
            for name, places in self._known.items():
                datasets.setdefault(name, Cursors(places).saved(whole=True))
        return json.dumps(datasets, separators=(",", ":"), sort_keys=True) if datasets else ""


def merged(texts: Iterable[str]) -> dict[str, dict[int, Place]]:
    """Merge the saved cursors of all ranks, by dataset; the later cursor of each shard wins."""
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
