"""`LateLoader`: a loader for a framework that computes its schedule before its run begins.

Lightning and the Hugging Face Trainer count the batches of an epoch before they make the optimizer, and `strata.init`
restores the optimizer. So the number of batches must not depend on the checkpoint: it follows from the dataset, the
global batch and the world.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strata.data.sampler import ElasticSampler
from strata.errors import ConfigError
from strata.training.loop.elastic_feed import ElasticFeed
from strata.training.loop.feeds import Feed, Feeding
from strata.training.loop.framework_loader import FrameworkLoader
from strata.training.loop.run import Run


class LateLoader:
    """The batches of `loader`, which can be counted before there is a run, and drawn once there is one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._size: int | None = None
        self._accumulate = 1
        self._bound: FrameworkLoader | None = None

    def plan(self, *, accumulate: int, world_size: int, global_batch: int, uneven: bool = True) -> None:
        """Divide each step of `global_batch` samples into `accumulate` batches a rank.

        `ConfigError` if Strata cannot assign the samples of this loader, or not in this world.
        """
        feeding = Feeding(
            rank=0, world_size=world_size, global_batch=global_batch, seed=0, uneven=uneven, saved={}
        )
        feed = feeding.feed(self.loader, accumulate, fixed=True)
        self._check(feed)
        self._accumulate = accumulate
        self._size = feed.size()

    def bind(self, run: Run) -> None:
        """Draw the batches from `run` from now on."""
        self._bound = run.loader(self.loader, accumulate=self._accumulate)
        self._check(self._bound.feed)

    def _check(self, feed: Feed) -> None:
        if not isinstance(feed, ElasticFeed) or isinstance(self.loader, ElasticSampler):
            raise ConfigError(
                f"Strata cannot assign the samples of this {type(self.loader).__name__}",
                hint="use a DataLoader over a dataset with a length, whose sampler draws the same indices on all ranks"
                " (docs/data.md has the table of loaders)",
            )

    def ended(self) -> None:
        """Complete the step of the last batch of an epoch, whose work is done."""
        if self._bound is not None:
            self._bound.ended()

    def set_epoch(self, epoch: int) -> None:
        """Name the next epoch."""
        if self._bound is not None:
            self._bound.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch in this world."""
        if self._size is None:
            raise ConfigError("the number of batches is known only once the training begins")
        return self._size

    def __iter__(self) -> Iterator[Any]:
        if self._bound is None:
            raise ConfigError("this loader has batches only within a training with Strata")
        yield from self._bound
