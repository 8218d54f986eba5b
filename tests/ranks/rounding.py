"""A DDP rank whose sums round differently with each `--rounding`, as on a device that adds in no fixed order.

The samples of each batch are put in an order of their own, so the gradient's last bits differ, and with them the
training. Which samples a step has does not change.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import strata
from tests.ranks.saying import say


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--rounding", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pace-s", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optim = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.arange(len(x)), x, y), batch_size=16, shuffle=True)
    run = strata.init(
        model=net, optim=optim, data=loader, global_batch=48, storage_path=options.storage, save_every_steps=5
    )
    ddp = DistributedDataParallel(net)
    say("begun", step=run.step, world=run.world.size)
    for _ in range(options.epochs):
        for ids, inputs, targets in run.steps():
            seed = (options.rounding << 24) + (run.step << 8) + run.world.rank  # torch takes 32 bits
            order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
            optim.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs[order]), targets[order])
            (loss * run.weight).backward()  # type: ignore[no-untyped-call]
            optim.step()
            say("step", step=run.begun, samples=ids.tolist())
            time.sleep(options.pace_s)
    with torch.no_grad():
        say("end", step=run.step, loss=nn.functional.cross_entropy(net(x), y).item())
    run.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
