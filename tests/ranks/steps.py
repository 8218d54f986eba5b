"""A rank that uses Strata: a barrier and a step, again and again.

It reports every step, and whether its session was connected at the step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import strata
from strata.errors import StaleGeneration
from tests.ranks.saying import say

WAITS = "STEPS_WAITS"
"""Set on a node whose ranks neither use Strata nor make a step, because all nodes of a job run one command."""


def main() -> int:
    """Step until the file `--until` exists, or for `--steps`; all ranks end at the same step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--until", type=Path, help="stop once this file exists")
    parser.add_argument("--pace-s", type=float, default=0.05)
    parser.add_argument("--no-barrier", action="store_true")
    parser.add_argument("--meet", type=Path, help="once this file exists, meet at one last barrier")
    options = parser.parse_args()
    while WAITS in os.environ:
        time.sleep(1000)

    client = strata.connect()
    say("start", pid=os.getpid(), worker=client.worker_id)
    step = 0
    try:
        while step < options.steps:
            stop = options.until is not None and options.until.exists()
            if options.meet and options.meet.exists():
                say("arriving", connected=client.connected)
                met = client.barrier("meet", payload=str(client.rank).encode())
                say("met", ranks=sorted(met), connected=client.connected)
                break
            if not options.no_barrier:
                votes = client.barrier("step", payload=b"stop" if stop else None)
                stop = bool(votes)
            if stop:
                break
            step += 1
            client.progress(step=step, phase="train")
            say("step", step=step, connected=client.connected)
            time.sleep(options.pace_s)
    except StaleGeneration as error:
        say("stale", reason=error.message)
        time.sleep(1000)  # the test checks that the agent ends this process
    say("end", step=step)
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
