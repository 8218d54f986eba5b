"""A run made by hand, over ranks that a test plays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from strata.client.checkpoints import CheckpointManager
from strata.training.cadence import Rule
from strata.training.clock import Clock
from strata.training.feeds import Feeding
from strata.training.goodput import Ledger
from strata.training.peers import Peers
from strata.training.run import Run
from strata.training.saves import Saves
from strata.training.state import Position


def make_run(
    peers: Peers, folder: Path, *, state: dict[str, Any], wait_s: float, save_every_steps: int = 10**9
) -> Run:
    """Return a run that begins from nothing, and saves to a storage of its own."""
    clock = Clock(monotonic_s=time.monotonic, unix_s=time.time)
    ledger = Ledger(since_s=clock.monotonic_s())
    checkpoints = CheckpointManager(folder)
    position = Position()
    return Run(
        peers,
        checkpoints=checkpoints,
        state=state,
        position=position,
        saves=Saves(
            peers,
            checkpoints,
            rule=Rule(every_steps=save_every_steps),
            wait_s=wait_s,
            clock=clock,
            ledger=ledger,
            position=position,
            saved={},
        ),
        ledger=ledger,
        clock=clock,
        feeding=Feeding(
            rank=peers.rank,
            world_size=peers.world_size,
            global_batch=None,
            seed=0,
            uneven=False,
            saved={},
        ),
        data=None,
        owns_group=False,
    )
