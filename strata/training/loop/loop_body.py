"""How far the body of a training loop has come with its batch: `LoopBody`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.training.loop.ordinary_feed import Fed
from strata.training.save.state import on_optimizer_steps


class LoopBody:
    """Knows the batch that the body has, and whether `optim.step()` followed it.

    A loop that is left tells its iterator so only once nobody holds that any more, as tqdm does. So whoever needs the
    position looks here first.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._fed: Fed | None = None
        self._steps = self._steps_before = 0
        on_optimizer_steps(state, after=self._stepped)

    def takes(self, fed: Fed) -> None:
        """Take note that the body has this batch from now on."""
        self._fed, self._steps_before = fed, self._steps

    def returned(self, fed: Fed) -> Fed | None:
        """Return `fed`, from which the body has returned, if that completes a step and `left` has not said so."""
        mine, self._fed = self._fed is fed, None
        return fed if mine and fed.last else None

    def left(self) -> Fed | None:
        """Return, once, the batch whose step is complete although its body has not returned."""
        fed = self._fed
        if fed is None or not fed.last or self._steps == self._steps_before:
            return None
        self._fed = None
        return fed

    def _stepped(self) -> None:
        self._steps += 1
