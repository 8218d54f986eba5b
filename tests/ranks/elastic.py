"""An ordinary torch script for torchrun that sums over all ranks again and again; it does not use Strata."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks.saying import say


def main(until: Path) -> None:
    """Step until the file `until` exists; all ranks end at the same step."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    say("start", pid=os.getpid(), agent=os.environ["STRATA_WORKER_ID"], world=world)
    step = 0
    while True:
        stop = torch.tensor([1.0 if until.exists() else 0.0, 1.0])
        dist.all_reduce(stop)
        if stop[1].item() != world:
            raise RuntimeError(f"{stop[1].item():g} ranks of {world} were summed")
        if stop[0].item():
            break
        step += 1
        say("step", step=step)
        time.sleep(0.05)
    dist.destroy_process_group()
    say("end", step=step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
