"""A rank that forks DataLoader workers while its session is open."""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import strata
from tests.ranks.saying import say


def main() -> int:
    """Iterate over the data for a number of epochs; each epoch forks new workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)

    data = TensorDataset(torch.arange(64))
    with strata.connect() as client:
        say("start", pid=os.getpid())
        step = 0
        for epoch in range(options.epochs):
            seen = 0
            loader = DataLoader(data, batch_size=16, num_workers=options.workers)
            for (batch,) in loader:
                seen += len(batch)
                step += 1
                client.progress(step=step, phase="train")
            client.barrier("epoch")
            say("epoch", epoch=epoch, seen=seen, connected=client.connected)
    return 0


if __name__ == "__main__":
    sys.exit(main())
