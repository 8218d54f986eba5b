"""A rank whose loop asks its `CheckpointManager` when to save, as loops for Orbax do."""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import strata
from tests.ranks.saying import say


def main() -> int:
    """Train until this job is requested to stop; then exit with 75, as a rank that stopped on request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    options = parser.parse_args()
    state: dict[str, Any] = {"step": 0}
    with (
        strata.connect() as client,
        strata.CheckpointManager(options.storage, client=client, save_interval_steps=1_000_000) as manager,
    ):
        manager.restore(state)
        say("start", step=state["step"])
        for step in itertools.count(state["step"] + 1):
            client.barrier("step")
            client.progress(step, "train")
            state["step"] = step
            if manager.should_save(step):
                manager.save_state(state, step, sync=True)
            if manager.reached_preemption(step):
                say("stopped", step=step, latest=manager.latest_step())
                raise strata.Preempted(f"stopped after step {step}")
            if step % 50 == 0:
                say("training", step=step)
    return 0


sys.exit(main())
