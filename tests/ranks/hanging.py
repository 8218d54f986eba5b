"""Ranks that meet at a barrier each step; one hangs in its loader in the first generation."""

from __future__ import annotations

import sys
import threading

import strata
from tests.ranks.saying import say

HANGS_AT = 5
STEPS = 8


def fetch_from_a_dead_disk() -> None:
    """Block forever."""
    threading.Event().wait()


def main() -> int:
    """Do a few steps; rank 1 of generation 1 hangs at step `HANGS_AT`."""
    client = strata.connect()
    for step in range(1, STEPS + 1):
        client.progress(step=step, phase="step")
        if (client.generation, client.rank, step) == (1, 1, HANGS_AT):
            say("hangs")
            fetch_from_a_dead_disk()
        client.barrier("step")
    say("end")
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
