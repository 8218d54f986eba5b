"""`TrainingData`: the loaders of one generation, and what the training's position means in their datasets.

A checkpoint holds, for every dataset that the training has used, the newest epoch with its *sample cursor*: the number
of samples of that epoch that completed steps have used, and the facts that give the cursor its meaning. The cursors
are committed with the checkpoint, in its metadata too, so that coordinators and commands can show them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from strata.client.api.arguments import integer
from strata.core.datasets.cursors import MOST_DATASETS
from strata.core.ids import checked_id
from strata.data.facts import DEFAULT, LOADER, DatasetFacts, check_unchanged
from strata.errors import DatasetMismatch, InvalidArgument
from strata.training.loop.feeds import Feed, Feeding, Loader
from strata.training.save.state import LOADER_KEY, Position

DATASET_KEY: Final = "dataset"
"""Beside the position: the name of the dataset that the position is in."""
DATASETS_KEY: Final = "datasets"
"""Beside the position: the cursor and the facts of every dataset, by name."""

log: Final = logging.getLogger("strata.training")


class TrainingData:
    """The loaders of one rank in one generation, for the trainer's thread."""

    def __init__(self, feeding: Feeding, *, saved: Mapping[str, Any]) -> None:
        """`saved` holds Strata's own entries in the checkpoint that the generation began from."""
        self._feeding = feeding
        self._feeds: dict[tuple[int, int, str, bool], tuple[Loader, Feed]] = {}
        self._datasets: dict[str, dict[str, Any]] = dict(saved.get(DATASETS_KEY, {}))
        name = saved.get(DATASET_KEY, "")
        known = self._datasets.get(name)
        self._facts = DatasetFacts.of({**known, "dataset": name}) if known is not None else None
        self._restored = self._facts is not None
        """Whether the facts are those of the checkpoint: no epoch has begun yet."""
        loader = dict(saved.get(LOADER_KEY, {}))
        self._loader_facts: Callable[[Position], dict[str, Any]] = lambda position: loader

    def feed(self, loader: Loader, accumulate: int, dataset: str = DEFAULT, *, fixed: bool = False) -> Feed:
        """Return the feed of `loader`; the same for each call with the same arguments."""
        accumulate = integer("accumulate", accumulate, below=2**31, hint="batches an optimizer step")
        if accumulate == 0:
            raise InvalidArgument("accumulate is 0", hint="an optimizer step has at least one batch")
        checked_id("dataset", dataset)
        if dataset not in self._datasets and len(self._datasets) >= MOST_DATASETS:
            raise InvalidArgument(f"{dataset!r} would be dataset {MOST_DATASETS + 1} of this training")
        key = (id(loader), accumulate, dataset, fixed)
        known = self._feeds.get(key)
        if known is None:
            feed = self._feeding.feed(loader, accumulate, dataset=dataset, fixed=fixed)
            known = self._feeds[key] = (
                loader,
                feed,
            )  # a reference to the loader keeps its id from being reused
        return known[1]

    def begin(self, feed: Feed, position: Position) -> bool:
        """Take `feed` as the loader of the epoch that `position` is in; return whether the epoch goes on.

        An epoch of which every sample was used is over, even if the dataset has grown since. `DatasetMismatch` if the
        first samples of an epoch that goes on were others than this loader's.
        """
        facts = feed.described(position.epoch)
        if self._facts is not None and position.epoch_samples:
            is_over = self._restored and position.epoch_samples == self._facts.length
            if is_over and facts != self._facts:
                log.info("epoch %d was over when it was saved, and its dataset has changed", position.epoch)
                return False
            try:
                check_unchanged(facts, self._facts, epoch=position.epoch, cursor=position.epoch_samples)
            except DatasetMismatch as error:
                if self._feeding.exact:
                    raise
                log.warning("%s: some samples come twice, or never", error.message)
                if facts.length is not None and position.epoch_samples >= facts.length:
                    return False
        self._facts, self._restored = facts, False
        self._loader_facts = feed.facts
        return True

    def note(self, position: Position) -> None:
        """Keep the cursor of the present dataset, before an epoch of another dataset may begin."""
        if self._facts is not None:
            saved = self._facts.saved()
            del saved["dataset"]
            cursor = {"epoch": position.epoch, "cursor": position.epoch_samples}
            self._datasets[self._facts.dataset] = cursor | saved

    def entries(self, position: Position) -> dict[str, Any]:
        """Return the entries of a checkpoint of `position`."""
        self.note(position)
        entries: dict[str, Any] = {
            LOADER_KEY: self._loader_facts(position),
            DATASETS_KEY: dict(self._datasets),
        }
        if self._facts is not None:
            entries[DATASET_KEY] = self._facts.dataset
        return entries


def digest_of_entries(entries: Mapping[str, Any]) -> str:
    """Return a digest of the present dataset's entry, equal on all ranks that train on the same samples; "" for none.

    The cursor of a loader whose order Strata does not know may differ: its ranks' batches may differ in size.
    """
    name = entries.get(DATASET_KEY)
    if name is None:
        return ""
    entry = dict(entries[DATASETS_KEY][name])
    if entry.get("order", LOADER) == LOADER:
        del entry["cursor"]
    text = json.dumps([name, entry], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
