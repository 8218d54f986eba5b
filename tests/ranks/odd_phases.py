"""A rank that reports unusual phases: restoring, warming up, compiling, evaluating, and the middle of a save."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import numpy as np

import strata
from tests.ranks.saying import say


class Weights:
    """A state that can be slow to restore and to save."""

    def __init__(self, phase: str, wait_s: float) -> None:
        self.total = np.zeros(1)
        self._phase = phase
        self._wait_s = wait_s
        self.begun = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._phase == "restore":
            say("restore", pid=os.getpid())
            time.sleep(self._wait_s)
        self.total[:] = state["total"]

    def state_dict(self) -> dict[str, Any]:
        if self._phase == "save" and self.begun:
            say("save", pid=os.getpid())
            time.sleep(self._wait_s)
        return {"total": self.total}


def main() -> int:
    """Train until it is preempted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--phase", required=True)
    parser.add_argument("--wait-s", type=float, default=1.0)
    parser.add_argument("--pace-s", type=float, default=0.05)
    options = parser.parse_args()

    phase, wait_s = options.phase, options.wait_s
    weights = Weights(phase, wait_s)
    run = strata.init(
        state={"weights": weights},
        storage_path=options.storage,
        save_every_steps=3 if phase == "save" else 10**9,
    )
    say("start", pid=os.getpid(), step=run.step, sum=float(weights.total[0]))
    began, weights.begun = run.step, True
    try:
        if phase == "warm-up":
            say(phase, pid=os.getpid())
            with run.phase(phase):
                time.sleep(wait_s)
        for number in run.steps(range(10**6)):
            if phase == "compile" and run.step == began:
                say(phase, pid=os.getpid())
                time.sleep(wait_s)
            run.context.barrier("collective")  # no rank completes a step without the others
            weights.total += number + 1
            time.sleep(options.pace_s)
            if phase == "step" and run.step == began + 2:
                say(phase, pid=os.getpid())
            if phase == "evaluation" and run.step % 5 == 4 and run.world.rank == 0:
                say(phase, pid=os.getpid())
                with run.phase(phase):
                    time.sleep(wait_s)
    except strata.Preempted as error:
        say("preempted", step=run.step, sum=float(weights.total[0]), why=str(error))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
