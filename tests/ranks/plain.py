"""A rank that does not use Strata, except for `--step`: it reports its environment and ends as the options demand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from types import FrameType

import strata
from tests.ranks.saying import say


def made_a_step() -> None:
    """Report a step to the agent; return once the coordinators know it, too."""
    with strata.connect() as client:
        client.progress(step=1, phase="train")
        client.barrier("step")


def main() -> int:
    """Return the requested exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--signal", type=int, help="end by this signal")
    parser.add_argument("--only-rank", type=int, help="the others wait for ever")
    parser.add_argument("--step", action="store_true", help="say that a step was made, before")
    parser.add_argument("--wait", action="store_true", help="until a signal comes")
    options = parser.parse_args()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        say("signal", number=number)
        sys.exit(options.exit)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    say("start", pid=os.getpid(), env=dict(os.environ))
    if options.step:
        made_a_step()
    if options.wait or options.only_rank not in {None, int(os.environ["RANK"])}:
        while True:
            time.sleep(1000)
    if options.signal is not None:
        if options.signal != signal.SIGKILL:
            signal.signal(options.signal, signal.SIG_DFL)
        os.kill(os.getpid(), options.signal)
    return int(options.exit)


if __name__ == "__main__":
    sys.exit(main())
