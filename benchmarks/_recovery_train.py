"""A small DistributedDataParallel training for `benchmarks.recovery`: with Strata, or as in torchrun's own docs.

Both save every 20 steps and continue from there; they differ only in how they join, save and restore. Each rank
prints its start, its first steps, and then every tenth step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY = 20
PACE_S = 0.02
"""Duration of a step, so that a busy machine delays the restart and not the training."""


def say(event: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n")
    sys.stdout.flush()


def strata_steps(net: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Iterator[int]:
    """Yield the number of each step, from the restored step on."""
    import strata  # noqa: PLC0415  # torchrun's own needs none of it

    run = strata.init(model=net, optim=optimizer, storage_path=folder, save_every_steps=SAVE_EVERY)
    while True:
        yield run.step + 1
        run.step_done(1)


def torchrun_steps(net: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Iterator[int]:
    """Do the same as `strata_steps`, with a snapshot that rank 0 writes, as in torch's tutorial on torchrun."""
    dist.init_process_group("gloo")
    snapshot, step = folder / "snapshot.pt", 0
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while True:
        step += 1
        yield step
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            body = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(body, snapshot.with_suffix(".new"))
            snapshot.with_suffix(".new").rename(snapshot)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("strata", "torchrun"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    begin = strata_steps if options.kind == "strata" else torchrun_steps
    steps = begin(net, optimizer, options.folder)
    step = next(steps)
    say("begin", rank=dist.get_rank(), world=dist.get_world_size(), step=step)
    model = DistributedDataParallel(net)
    trained = 0
    while True:
        batch: Tensor = torch.randn(16, 64)
        optimizer.zero_grad()
        loss: Any = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        trained += 1
        if trained <= 5 or trained % 10 == 0:
            say("trained", rank=dist.get_rank(), step=step)
        time.sleep(PACE_S)
        step = next(steps)


if __name__ == "__main__":
    main()
