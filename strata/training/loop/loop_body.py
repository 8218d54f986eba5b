"""`LoopBody`: tracks whether the body of a training loop has completed a step with its current batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.training.loop.ordinary_feed import Fed
from strata.training.loop.virtual_ranks import RealRanks
from strata.training.save.state import on_optimizer_steps


class LoopBody:
    """Tracks the batch that the loop body works on, and whether `optim.step()` has been called with it.

    If the program leaves a loop, Python closes the loop's iterator only once nothing refers to the iterator any
    more (tqdm may still do, for example). So every reader of the position calls `left` first.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.virtual = RealRanks()
        self._fed: Fed | None = None
        self._steps = self._steps_before = 0
        on_optimizer_steps(state, before=self._about_to_step, after=self._stepped)

    def takes(self, fed: Fed) -> None:
        """Record that the body works on the batch `fed` from now on."""
        self._fed, self._steps_before = fed, self._steps
        self.virtual.takes(fed)

    def returned(self, fed: Fed) -> Fed | None:
        """Return `fed`, whose body has ended, if `fed` completes a step and `left` has not returned it yet."""
        self.virtual.returned(fed)
        mine, self._fed = self._fed is fed, None
        return fed if mine and fed.last else None

    def left(self) -> Fed | None:
        """Return, once, the batch whose step is complete although its body has not ended."""
        return self.ended() if self._steps != self._steps_before else None

    def ended(self) -> Fed | None:
        """Return, once, the step's last batch; the caller knows that its body has ended."""
        fed = self._fed
        if fed is None or not fed.last:
            return None
        self._fed = None
        self.virtual.returned(fed)
        return fed

    def sum_gradients(self) -> None:
        """Make the gradients those of the whole step, if the ranks compute virtual ranks."""
        self.virtual.sum_gradients(self._fed)

    def _about_to_step(self, has_closure: bool) -> None:
        if has_closure:
            self.virtual.refuse_closure()
        self.sum_gradients()

    def _stepped(self) -> None:
        self._steps += 1
