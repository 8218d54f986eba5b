"""A rank of a DistributedDataParallel training that continues in the same process (gloo, on CPU)."""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import strata
from tests.ranks.saying import say

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 240).unsqueeze(1))


def main(orchestrator: strata.TrainingOrchestrator) -> None:
    """Train in one generation."""
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    run = orchestrator.init(model=net, optim=optim)
    place = {"rank": run.world.rank, "generation": run.world.generation}
    say("begun", **place, pid=os.getpid(), step=run.step, worker=run.world.worker_id)
    model = DistributedDataParallel(net)
    loader = torch.utils.data.DataLoader(DATA, batch_size=4, shuffle=True)
    for _ in range(3):
        for (x,) in run.steps(loader):
            optim.zero_grad()
            (model(x) - 2 * x - 1).pow(2).mean().backward()
            optim.step()
            say("step", **place, step=run.begun)
            time.sleep(0.02)
    run.close()
    say("end", **place, step=run.step, weight=round(net.weight.item(), 4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    options = parser.parse_args()
    strata.TrainingOrchestrator(storage_path=options.storage, save_every_steps=10).train(main)
