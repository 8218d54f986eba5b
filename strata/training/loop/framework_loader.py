"""`FrameworkLoader`: a loader for a loop that Strata does not run, such as that of a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from strata.training.loop.feeds import Feed


class FrameworkLoader:
    """Each iteration yields this rank's remaining batches of the epoch of `set_epoch`, and counts steps as `run.steps`.

    The request for the first batch of a step completes the step before, so the framework must have done all work on it.
    After its work on the last batch of an epoch the framework must call `ended`, because no request follows.
    """

    def __init__(
        self, feed: Feed, batches: Callable[[int], Iterator[Any]], ended: Callable[[], None]
    ) -> None:
        """`batches` returns the remaining batches of the epoch with this number."""
        self.feed = feed
        self._size = feed.size()
        self._batches = batches
        self._ended = ended
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Name the next epoch; a framework calls this before each."""
        self._epoch = epoch

    def ended(self) -> None:
        """Complete the step of the last batch, whose work is done; save if a save is due."""
        self._ended()

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch in this world."""
        if self._size is None:
            raise TypeError("this loader has no length")
        return self._size

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches(self._epoch)  # the epoch that is named when the first batch is requested
