"""A `Run` built by hand, for ranks that a test plays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from strata.client.checkpoints.manager import CheckpointManager
from strata.config import TrainingConfig
from strata.core.health.goodput import Ledger
from strata.training.generation_exit import NeverEnds
from strata.training.loop.clock import Clock
from strata.training.loop.reporting import TrainingReporter
from strata.training.loop.run import Run
from strata.training.rank_context import RankContext
from strata.training.restore import begin
from strata.training.settings_agreement import Sampling


def make_run(
    context: RankContext, folder: Path, *, state: dict[str, Any], wait_s: float, save_every_steps: int = 10**9
) -> Run:
    """Return a run that starts without a checkpoint, and saves to a storage of its own."""
    clock = Clock(monotonic_s=time.monotonic, unix_s=time.time, thread_s=time.thread_time)
    checkpoints = CheckpointManager(folder)
    config = TrainingConfig(save_every_steps=save_every_steps, save_wait_s=wait_s)
    return Run(
        context,
        checkpoints=checkpoints,
        state=state,
        beginning=lambda: begin(
            context,
            checkpoints,
            state,
            config=config,
            sampling=Sampling(),
            clock=clock,
            ledger=Ledger(since_s=clock.monotonic_s()),
        ),
        hooked=lambda run: None,
        ending=NeverEnds(),
        clock=clock,
        data=None,
        reporter=TrainingReporter(total_steps=None),
    )
