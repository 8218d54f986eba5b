"""A rank that goes on training but cannot save until a file exists."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import strata
from strata.core.stop.save_hold import SaveHold
from tests.ranks.saying import say


def main() -> int:
    """Report steps, and that the save of step 20 is held up."""
    until = Path(sys.argv[1])
    with strata.connect() as client:
        client.hold_saves(SaveHold(step=20, reason="disk full", host="gpu-b", held_s=240.0))
        step = 20
        while not until.exists():
            step += 1
            client.progress(step, "step")
            time.sleep(0.1)
        client.hold_saves(None)
        say("saves again")
        while not Path(f"{until}.over").exists():
            step += 1
            client.progress(step, "step")
            time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
