"""A standalone process that meets the other processes at one barrier after another, until SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from types import FrameType

import strata
from tests.ranks.saying import say


def main() -> int:
    """Return 0 after the round in which any process was asked to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, required=True)
    options = parser.parse_args()
    requested = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal requested
        requested = True

    signal.signal(signal.SIGTERM, on_signal)
    client = strata.connect(min_workers=options.members)
    say("joined", rank=client.rank, generation=client.generation)
    count = 0
    while True:
        count += 1
        time.sleep(0.05)  # the computation between two barriers
        # all stop after the same round: the first round in which a payload requests the stop
        stops = client.barrier("round", payload=b"stop" if requested else b"on")
        say("met", rank=client.rank, generation=client.generation, count=count)
        if b"stop" in stops.values():
            break
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
