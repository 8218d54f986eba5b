"""`LoopBody`: tracks whether the body of a training loop has completed a step with its current batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.training.loop.ordinary_feed import Fed
from strata.training.save.state import on_optimizer_steps


class LoopBody:
    """Tracks the batch that the loop body works on, and whether `optim.step()` has been called with it.

    If the program leaves a loop, Python closes the loop's iterator only once nothing refers to the iterator any
    more (tqdm may still do, for example). So every reader of the position calls `left` first.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._fed: Fed | None = None
        self._steps = self._steps_before = 0
        on_optimizer_steps(state, after=self._stepped)

    def takes(self, fed: Fed) -> None:
        """Record that the body works on the batch `fed` from now on."""
        self._fed, self._steps_before = fed, self._steps

    def returned(self, fed: Fed) -> Fed | None:
        """Return `fed`, whose body has ended, if `fed` completes a step and `left` has not returned it yet."""
        mine, self._fed = self._fed is fed, None
        return fed if mine and fed.last else None

    def left(self) -> Fed | None:
        """Return, once, the batch whose step is complete although its body has not ended."""
        fed = self._fed
        if fed is None or not fed.last or self._steps == self._steps_before:
            return None
        self._fed = None
        return fed

    def _stepped(self) -> None:
        self._steps += 1
