"""A rank that trains a few steps with strata.init; the array in its state has the given length."""

from __future__ import annotations

import argparse
import atexit
import time
from typing import Any

import numpy as np

import strata


def main() -> None:
    """Train, and save after each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--numbers", type=int, default=4)
    parser.add_argument("--more", action="store_true", help="have a key that was not saved")
    parser.add_argument("--slow-end-s", type=float, default=0.0, help="how long the process takes to exit")
    options = parser.parse_args()
    atexit.register(time.sleep, options.slow_end_s)
    state: dict[str, Any] = {"weights": np.zeros(options.numbers)}
    if options.more:
        state["bias"] = np.zeros(2)
    run = strata.init(state=state, storage_path=options.storage, save_every_steps=1)
    for _ in run.steps(range(2)):
        state["weights"] += 1
    run.close()


if __name__ == "__main__":
    main()
