"""`Holds`: the held saves of a `CheckpointManager`, for the training loop, which decides how to proceed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from strata.checkpoint.save.retry import SaveRetry
from strata.checkpoint.save.writer import AsyncCheckpointWriter
from strata.core.stop.save_hold import SaveHold
from strata.errors import Unavailable

POLL_S: Final = 0.1


class Holds:
    """A manager's held saves: saves that are retried because the storage refuses them for a transient reason."""

    def __init__(self, retry: SaveRetry, writer: AsyncCheckpointWriter) -> None:
        self.retry = retry
        self._writer = writer

    @property
    def current(self) -> SaveHold | None:
        """The transient reason for which no state can be saved now, or None."""
        return self.retry.hold

    def on_over(self, act: Callable[[str], None]) -> None:
        """Register `act`: the writing thread calls it with the reason once a save was held for `save_grace_s`.

        `act` decides how to proceed. The held save then counts as dropped, and no call raises its error.
        """
        self.retry.on_over = act

    def wait_for_buffer(self, limit_s: float) -> str:
        """Wait until another save could begin without waiting, and return "". If a save is held, or after `limit_s`,
        return the reason why another save would have to wait.
        """
        end_s = time.monotonic() + limit_s
        while not self._writer.wait_for_buffer(0.0):
            if (hold := self.current) is not None:
                return f"{hold.reason} on host {hold.host}"
            if time.monotonic() >= end_s:
                return f"two saves are in flight, for more than {limit_s:g} s"
            time.sleep(POLL_S)
        hold = self.current
        return "" if hold is None else f"{hold.reason} on host {hold.host}"

    def free_buffer(self, limit_s: float) -> None:
        """Return once another save could begin without waiting for a save in flight; `Unavailable` after `limit_s`."""
        if not self._writer.wait_for_buffer(limit_s):
            raise Unavailable(f"two saves are in flight, for more than {limit_s:g} s", hint="")

    def drop(self) -> None:
        """If a save is held, abort the saves in flight on all ranks: a newer save replaces them."""
        if self.current is not None:
            self._writer.give_way()
