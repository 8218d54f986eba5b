"""Ranks whose states are equal at the first save, different at the second, and equal again at the third.

At the end each rank restores all three saves, and reports whether it got every bit of its own state back.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import strata
from tests.ranks.saying import say


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 256))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--kind", default="full")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank = int(os.environ["RANK"])

    net = network()
    model: Any = net
    if options.ddp:
        distributed.init_process_group("gloo")
        model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(net.parameters())
    held, sizes = [], []
    with strata.connect() as client:
        manager = strata.CheckpointManager(options.storage, client=client)
        for step, seed in ((1, 0), (2, 10 + rank), (3, 0)):
            if step == 3:  # set the same values on every rank
                for name, value in net.state_dict().items():
                    value.copy_(torch.full_like(value, len(name)))
            torch.manual_seed(seed)
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            if step < 3:
                optimizer.step()
            state = {"model": model, "optim": optimizer}
            held.append(copy.deepcopy({key: value.state_dict() for key, value in state.items()}))
            info = manager.save_state(state, step, checkpoint_type=options.kind)
            sizes.append(info.wait(60).size_bytes)
            client.barrier("saved")
        restored = []
        for step, saved in enumerate(held, 1):
            fresh = network()
            here: dict[str, Any] = {"model": fresh, "optim": torch.optim.AdamW(fresh.parameters())}
            if options.ddp:
                here["model"] = DistributedDataParallel(fresh, broadcast_buffers=False)
            manager.restore(here, step=step)
            restored.append(same({key: value.state_dict() for key, value in here.items()}, saved))
        client.barrier("restored")
        manager.close()
    weights = sum(value.nbytes for value in net.state_dict().values())
    moments = sum(value.nbytes for each in optimizer.state.values() for value in each.values())
    buffers = sum(value.nbytes for value in net.buffers())
    say("end", restored=restored, sizes=sizes, weights=weights, moments=moments, buffers=buffers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
