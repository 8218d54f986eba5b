"""A rank that trains on numbers it can check, and saves. Each rank has its own state.

After `step` steps, `sum` has the value of an undisturbed run; `mine` differs between the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import numpy as np

import strata
from strata.errors import StaleGeneration
from tests.ranks.saying import say


def main() -> int:
    """Train from the step that this world restores up to a number of steps; save every few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pace-s", type=float, default=0.02)
    parser.add_argument("--keep", type=int)
    options = parser.parse_args()

    client = strata.connect()
    say("start", pid=os.getpid(), worker=client.worker_id)
    state: dict[str, Any] = {"sum": np.zeros(1000), "progress": {"step": 0}, "mine": client.rank}
    try:
        with strata.CheckpointManager(options.storage, client=client, keep_count=options.keep) as ckpt:
            restored = ckpt.restore(state)
            step = int(state["progress"]["step"])
            say("restored", step=step, found=restored is not None, mine=state["mine"])
            while step < options.steps:
                client.barrier("step")
                step += 1
                state["sum"] += step
                state["progress"]["step"] = step
                client.progress(step=step, phase="train")
                time.sleep(options.pace_s)
                if step % options.every == 0:
                    info = ckpt.save_state(state, step=step)
                    say("saving", step=step)
                    if step + options.every > options.steps:
                        info.wait(60)
                        say("saved", step=step, path=info.path)
            ckpt.wait_until_finished(60)
            say("end", step=step, sum=float(state["sum"][0]), steps=ckpt.all_steps())
    except StaleGeneration as error:
        say("stale", reason=error.message)
        time.sleep(1000)  # the agent ends this process
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
