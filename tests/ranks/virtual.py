"""A rank that trains with virtual ranks, and reports a digest of all bits of its parameters each step."""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from torch import nn

import strata
from tests.ranks.ddp import digest
from tests.ranks.saying import say


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--virtual", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=310)
    parser.add_argument("--pace-s", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)

    torch.manual_seed(os.getpid())  # ranks begin with different parameters, unless rank 0's are given to all
    net = nn.Sequential(
        *(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Dropout(0.3), nn.Linear(64, 64), nn.Tanh()),
        nn.Linear(64, 4),
    )
    if not os.environ.get("STRATA_RESTORE"):
        torch.manual_seed(1)
        for parameter in net.parameters():
            if os.environ.get("RANK", "0") == "0":
                nn.init.normal_(parameter)
    optim = torch.optim.AdamW(net.parameters(), lr=0.01)
    numbers = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(options.samples, 16, generator=numbers),
        torch.randn(options.samples, 4, generator=numbers),
    )
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    run = strata.init(
        model=net,
        optim=optim,
        storage_path=options.storage,
        save_every_steps=3,
        virtual_ranks=options.virtual,
    )
    world = run.world
    say("begun", pid=os.getpid(), step=run.step, world=world.size, generation=world.generation)
    for _ in range(options.epochs):
        for inputs, targets in run.steps(loader):
            (((net(inputs) - targets) ** 2).mean() * run.weight).backward()
            if run.last_of_step:
                run.sum_gradients()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optim.step()
                optim.zero_grad()
                say("step", step=run.begun, digest=digest(net), generation=world.generation)
                time.sleep(options.pace_s)
    run.close()
    say("end", step=run.step, digest=digest(net))
    return 0


if __name__ == "__main__":
    sys.exit(main())
