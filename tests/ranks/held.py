"""A rank that trains with strata.init, in step with the others, until a file exists."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import strata
from tests.ranks.saying import say

NUMBERS = 200_000
"""Numbers of 8 bytes each; they differ from rank to rank, so each rank writes its own."""


def main() -> int:
    """Train; report each step and the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--until", type=Path, required=True)
    parser.add_argument("--pace-s", type=float, default=0.05)
    options = parser.parse_args()
    state: dict[str, Any] = {"sum": np.zeros(1), "own": np.zeros(NUMBERS)}
    run = strata.init(state=state, storage_path=options.storage)
    place = {"rank": run.world.rank, "generation": run.world.generation}
    say("begun", **place, step=run.step)
    try:
        over = False
        for number in run.steps(range(10**6)):
            if over:
                break
            is_over = run.world.rank == 0 and options.until.exists()
            over = bool(run.context.barrier("collective", b"over" if is_over else None))
            state["sum"] += number
            state["own"][:] = number * 1000 + run.world.rank
            say("step", **place, step=run.begun)
            time.sleep(options.pace_s)
        run.close()
    except strata.Preempted as error:
        say("preempted", **place, step=run.step, why=str(error))
        raise
    say("end", **place, step=run.step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
