"""A data-parallel PyTorch training that survives failures: run it with `strata run -- python train.py`.

It is an ordinary DistributedDataParallel script except for the lines with `strata` and `run`. Each rank
prints one JSON line a step, so that the demo can see which steps were computed when.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch
from digits import Digits, Net, accuracy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import strata


def say(**facts: object) -> None:
    """Print one event; a single write, so that lines of several ranks never mix."""
    sys.stdout.write(json.dumps({"at": round(time.time(), 3), **facts}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--storage", required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    run = strata.init(  # joins the job, initialises the process group, restores the checkpoint
        model=net,
        optim=optimizer,
        storage_path=options.storage,
        save_every_steps=options.save_every,
    )
    world = run.world
    say(event="start", rank=world.rank, world=world.size, generation=world.generation, pid=os.getpid())
    say(event="restore", rank=world.rank, step=run.step, restored=run.step > 0)

    train = Digits(train=True)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=options.batch, sampler=sampler, num_workers=1)
    model = DistributedDataParallel(net)
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in run.steps(loader):
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            (loss * run.weight).backward()
            optimizer.step()
            say(event="step", rank=world.rank, step=run.begun, loss=round(loss.item(), 4))
    if world.rank == 0:
        say(event="accuracy", rank=world.rank, value=round(accuracy(net), 4), step=run.step)


if __name__ == "__main__":
    main()
