"""A rank that trains under DistributedDataParallel, and reports a digest of all bits of its parameters each step."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import strata
from tests.ranks.saying import say


def make_net() -> nn.Module:
    """Return a net large enough for several DDP buckets, with random layers and with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(32, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 256), nn.Tanh()),
        *(nn.Dropout(0.2), nn.Linear(256, 150), nn.ReLU(), nn.Linear(150, 8)),
    )


def digest(net: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in net.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--samples", type=int, default=480)
    parser.add_argument(
        "--hang-at", type=int, nargs="*", default=[], help="the step to hang in, by generation"
    )
    parser.add_argument("--ddp", type=json.loads, default={}, help="settings of DistributedDataParallel")
    parser.add_argument("--wrapped", choices=["before", "after"], default="before", help="strata.init")
    options = parser.parse_args()
    torch.set_num_threads(1)

    net: Any = make_net()
    optim = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    settings = {"bucket_cap_mb": 0.2, **options.ddp}
    if options.wrapped == "before":
        torch.distributed.init_process_group("gloo")
        ddp = DistributedDataParallel(net, **settings)
        run = strata.init(model=ddp, optim=optim, storage_path=options.storage, save_every_steps=5)
    else:
        run = strata.init(model=net, optim=optim, storage_path=options.storage, save_every_steps=5)
        ddp = DistributedDataParallel(net, **settings)
    say("begun", pid=os.getpid(), step=run.step)
    numbers = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(options.samples, 32, generator=numbers),
        torch.randn(options.samples, 8, generator=numbers),
    )
    for inputs, targets in run.steps(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)):
        if [run.begun] == options.hang_at[run.world.generation - 1 : run.world.generation]:
            time.sleep(1000)  # until it is killed
        optim.zero_grad()
        ((ddp(inputs) - targets) ** 2).mean().backward()
        optim.step()
        say("step", step=run.begun, digest=digest(net))
    run.close()
    say("end", step=run.step, digest=digest(net))
    return 0


if __name__ == "__main__":
    sys.exit(main())
