"""Ranks that meet at a barrier each step; one crashes in the first generation and leaves a large core file."""

from __future__ import annotations

import argparse
import os
import resource
import sys

import strata
from tests.ranks.saying import say

CRASHES_AT = 3
STEPS = 6


def main() -> int:
    """Do a few steps; rank 1 of generation 1 crashes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="where the kernel puts the core")
    parser.add_argument(
        "--mb", type=int, required=True, help="how much memory the rank has touched that crashes"
    )
    options = parser.parse_args()
    os.chdir(options.folder)
    client = strata.connect()
    crashes = (client.generation, client.rank) == (1, 1)
    touched = b"x" * ((options.mb << 20) if crashes else 1)
    for step in range(1, STEPS + 1):
        client.progress(step=step, phase="step")
        if crashes and step == CRASHES_AT:
            resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            say("crashes", pid=os.getpid(), touched=len(touched))
            os.abort()
        client.barrier("step")
        say("step", step=step)
    say("end")
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
