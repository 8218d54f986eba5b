"""A standalone process that meets the others in one barrier after the other, until SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from types import FrameType

import strata
from tests.ranks.saying import say


def main() -> int:
    """Return 0 once the round in which somebody was asked to stop is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, required=True)
    options = parser.parse_args()
    asked = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, on_signal)
    client = strata.connect(min_workers=options.members)
    say("joined", rank=client.rank, generation=client.generation)
    count = 0
    while True:
        count += 1
        time.sleep(0.05)  # the training that there is between two barriers
        # all stop after the same round: the first of them in whose payload one asks for it
        stops = client.barrier("round", payload=b"stop" if asked else b"on")
        say("met", rank=client.rank, generation=client.generation, count=count)
        if b"stop" in stops.values():
            break
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
