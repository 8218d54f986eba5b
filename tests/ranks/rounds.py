"""Trainers that are preempted and started again, round after round, as by a scheduler.

Each trainer is a fork of this process, which has only done the imports: otherwise twenty rounds would spend their
time on imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

import strata.client.rank.connect
import strata.training.orchestrator  # noqa: F401  # as said above
from tests.ranks import stopping
from tests.ranks.saying import say


def trainer(number: int) -> None:
    """Run as one of the trainers."""
    os.environ["STRATA_WORKER_ID"] = f"lone-{number}"
    sys.exit(stopping.main())


def main() -> int:
    """Start all trainers again whenever all have ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    options, rest = parser.parse_known_args()
    forking = multiprocessing.get_context("fork")
    count = int(rest[rest.index("--min-workers") + 1])
    sys.argv[1:] = rest
    for number in range(options.rounds):
        trainers = [forking.Process(target=trainer, args=(i,), daemon=True) for i in range(count)]
        for one in trainers:
            one.start()
        for one in trainers:
            one.join()
        say("round", number=number, codes=[one.exitcode for one in trainers])
    return 0


if __name__ == "__main__":
    sys.exit(main())
