"""The writer of a `CheckpointManager`: what saves in the background, and tells of saves that are held."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from strata.checkpoint.bases import Doubted
from strata.checkpoint.catalog import Catalog
from strata.checkpoint.save_retry import SaveRetry
from strata.checkpoint.saving import Saver
from strata.checkpoint.sharing import Exchange
from strata.checkpoint.sink import Storage
from strata.checkpoint.writer import AfterSave, AsyncCheckpointWriter, WhenFull
from strata.client.checkpoint_config import CheckpointManagerConfig
from strata.core.save_hold import SaveHold
from strata.errors import Unavailable

if TYPE_CHECKING:
    from strata.client.checkpoint_port import SessionPort

LOOK_S: Final = 0.1
FAILING_PATIENCE_S: Final = 5.0
"""How long a program that fails waits for a save that makes no progress: other ranks may never come to it."""


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


def retry_of(config: CheckpointManagerConfig, client: SessionPort | None) -> SaveRetry:
    """Return what holds saves; `client` tells the coordinators of it."""
    if client is None:
        return SaveRetry(grace_s=config.save_grace_s)
    return SaveRetry(grace_s=config.save_grace_s, tell=client.hold_saves)


def writer_of(
    config: CheckpointManagerConfig,
    *,
    storage: Storage,
    catalog: Catalog,
    doubted: Doubted,
    exchange: Exchange | None,
    retry: SaveRetry,
    after_save: AfterSave,
    coordinated: bool,
) -> AsyncCheckpointWriter:
    """Return the writer that `config` asks for."""
    saver = Saver(
        storage=storage,
        catalog=catalog,
        commit_timeout_s=config.commit_timeout_s,
        doubted=doubted,
        threads=config.io_threads,
        exchange=exchange,
        retry=retry,
    )
    return AsyncCheckpointWriter(
        saver,
        after_save=after_save,
        failing_patience_s=FAILING_PATIENCE_S if coordinated else None,
        when_full=WhenFull(config.when_full),
        low_memory=config.low_memory,
    )
