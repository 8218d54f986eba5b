"""What a `CheckpointManager`'s saves do while they are held, for whoever decides what a training does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from strata.checkpoint.save.retry import SaveRetry
from strata.checkpoint.save.writer import AsyncCheckpointWriter
from strata.core.stop.save_hold import SaveHold
from strata.errors import Unavailable

LOOK_S: Final = 0.1


class Holds:
    """A manager's saves as far as they are held, for whoever decides what a training does meanwhile."""

    def __init__(self, retry: SaveRetry, writer: AsyncCheckpointWriter) -> None:
        self.retry = retry
        self._writer = writer

    @property
    def current(self) -> SaveHold | None:
        """Why nothing can be saved at this moment, for a reason that time may heal."""
        return self.retry.hold

    def on_over(self, act: Callable[[str], None]) -> None:
        """Have the writing thread tell `act` why, when a save was held for `save_grace_s`.

        What follows is `act`'s business: such a save counts as dropped then, and raises nowhere.
        """
        self.retry.on_over = act

    def wait_room(self, limit_s: float) -> str:
        """Return why another save would have to wait, once one is held or after `limit_s`; "" once it need not."""
        end_s = time.monotonic() + limit_s
        while not self._writer.wait_room(0.0):
            if (hold := self.current) is not None:
                return f"{hold.reason} on host {hold.host}"
            if time.monotonic() >= end_s:
                return f"two saves are in flight, for more than {limit_s:g} s"
            time.sleep(LOOK_S)
        hold = self.current
        return "" if hold is None else f"{hold.reason} on host {hold.host}"

    def make_room(self, limit_s: float) -> None:
        """Return once another save need not wait for one in flight; `Unavailable` after `limit_s`."""
        if not self._writer.wait_room(limit_s):
            raise Unavailable(f"two saves are in flight, for more than {limit_s:g} s", hint="")

    def drop(self) -> None:
        """Give up, for all ranks, what is in flight while a save is held: a newer one takes its place."""
        if self.current is not None:
            self._writer.give_way()
