"""A rank that reads with torchdata's StatefulDataLoader: its own stream, or its share of a shuffled dataset."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import strata
from tests.ranks.saying import say

LENGTH = 240
"""Number of samples of the dataset, and of each rank's stream."""
BATCH = 6


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Numbers of one rank: rank r has r, r + 1000, r + 2000 …"""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.at += 1
            yield 1000 * (self.at - 1) + self.rank
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["stream", "shuffled"])
    parser.add_argument("--storage", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--hang-at", type=int, nargs="*", default=[], help="the step to hang in, by generation"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    run = strata.init(state={"weights": torch.zeros(1)}, storage_path=options.storage, save_every_steps=5)
    rank = run.world.rank
    say("begun", pid=os.getpid(), step=run.step, world=run.world.size)
    loader: Any
    if options.kind == "stream":
        loader = StatefulDataLoader(Stream(rank), batch_size=BATCH, num_workers=1)
    else:
        loader = StatefulDataLoader(TensorDataset(torch.arange(LENGTH)), batch_size=BATCH, shuffle=True)
    for _ in range(options.epochs):
        for batch in run.steps(loader):
            if [run.begun] == options.hang_at[run.world.generation - 1 : run.world.generation]:
                time.sleep(1000)  # until the process is ended
            samples = batch[0] if options.kind == "shuffled" else batch
            run.context.barrier("reduce", b"")  # as in a collective
            say("step", step=run.begun, epoch=run.position.epoch, samples=samples.tolist())
    run.close()
    say("end", step=run.step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
