"""A rank whose batches come from DataLoader workers; it trains until it is preempted."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import strata
from tests.ranks.saying import say


def workers() -> list[int]:
    """Return the process ids of the live workers."""
    return sorted(child.pid for child in multiprocessing.active_children() if child.pid is not None)


def main() -> int:
    """Train until a signal comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--method", required=True, help="how workers begin: fork or spawn")
    options = parser.parse_args()
    torch.set_num_threads(1)

    data = TensorDataset(torch.arange(100_000))
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=options.method)
    run = strata.init(model=torch.nn.Linear(1, 1), data=loader, storage_path=options.storage)
    try:
        for _batch in run.steps():
            if run.step == 3:
                say("training", workers=workers())
            time.sleep(0.002)
    except strata.Preempted:
        say("preempted", step=run.step)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
