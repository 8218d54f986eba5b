"""Ranks that wait for each other in every step; one rank's data is slow."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import strata

SLOW = 2


def main() -> int:
    """Step until the file of the second argument exists."""
    storage, until = sys.argv[1], Path(sys.argv[2])
    state: dict[str, Any] = {"weights": np.zeros(1)}
    run = strata.init(state=state, storage_path=storage, save_every_steps=10**6)

    def batches() -> Iterator[np.ndarray[Any, Any]]:
        while True:
            time.sleep(0.1 if run.world.rank == SLOW else 0.01)
            yield np.zeros(4)

    with run:
        for _batch in run.steps(batches()):
            # the collective of a synchronous training
            if run.context.barrier("step", b"stop" if until.exists() else None):
                break
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
