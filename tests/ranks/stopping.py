"""A rank that trains with strata.init until it is preempted, in step with the others."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import strata
from tests.ranks.saying import say


def main() -> int:
    """Train for a number of steps; report at which step and how it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--pace-s", type=float, default=0.002)
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--ends-well", action="store_true", help="end with 0 also when preempted")
    parser.add_argument("--until", type=Path, help="end, once all steps are done, when this file is there")
    options = parser.parse_args()

    state: dict[str, Any] = {"sum": np.zeros(1000)}
    run = strata.init(state=state, storage_path=options.storage, min_workers=options.min_workers)
    say("start", pid=os.getpid(), step=run.step, sum=float(state["sum"][0]), worker=run.world.worker_id)
    began = run.step
    try:
        for number in run.steps(range(options.steps)):
            run.context.barrier("collective")  # no rank completes a step without the others
            state["sum"] += number + 1
            time.sleep(options.pace_s)
            if run.step == began + 2:
                say("training", step=run.step)
    except strata.Preempted as error:
        say("preempted", step=run.step, sum=float(state["sum"][0]), why=str(error))
        if options.ends_well:
            return 0
        raise
    except strata.StaleGeneration as error:
        say("stale", step=run.step, why=error.message)
        time.sleep(1000)  # the agent ends this process
    say("end", step=run.step, sum=float(state["sum"][0]))
    if options.until is not None:
        run.checkpoints.wait_until_finished()
        say("saved", step=run.step)
    while options.until is not None and not options.until.exists():
        time.sleep(0.01)
    run.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
