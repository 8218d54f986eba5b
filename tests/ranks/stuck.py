"""Ranks that wait for each other in every step; the loader of one rank blocks while a file exists."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import strata
from tests.ranks.saying import say

STUCK = 2
STEPS = 60
"""Steps that each rank makes before it reports that it trains. By then every replica knows the rank's usual step
time."""


def main() -> int:
    """Step until the third argument's file exists; the second argument's file blocks the loader of rank `STUCK`."""
    storage, block, until = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    state: dict[str, Any] = {"weights": np.zeros(1)}
    run = strata.init(state=state, storage_path=storage, save_every_steps=10**6)

    def read_shard() -> None:
        while run.world.rank == STUCK and block.exists():
            time.sleep(0.05)

    def batches() -> Iterator[np.ndarray[Any, Any]]:
        while True:
            read_shard()
            time.sleep(0.02)
            yield np.zeros(4)

    begun = run.begun
    with run:
        for _batch in run.steps(batches()):
            if run.begun == begun + STEPS:
                say("trains", pid=os.getpid())
            # the collective of a synchronous training
            if run.context.barrier("step", b"stop" if until.exists() else None):
                break
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
