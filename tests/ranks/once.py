"""A rank of an ordinary DistributedDataParallel training. Its checkpoints must store every tensor once.

`--wrap` selects whether the model is wrapped before or after `strata.init`. `--more` adds further objects of a
trainer: EMA weights, a GradScaler, a scheduler and a compiled forward pass.
"""

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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import strata
from tests.ranks.saying import say

GLOBAL_BATCH = 24
LENGTH = 240


def network() -> nn.Module:
    # each large tensor is smaller than a chunk; the buffers of the norm differ between the ranks
    return nn.Sequential(
        nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 512), nn.Linear(512, 8)
    )


def state_bytes(value: Any) -> int:
    """Return the total size in bytes of the tensors in a state."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if hasattr(value, "state_dict"):
        return state_bytes(value.state_dict())
    if isinstance(value, dict):
        return sum(map(state_bytes, value.values()))
    return sum(map(state_bytes, value)) if isinstance(value, list | tuple) else 0


def digest_of(*values: Any) -> str:
    """Return a digest of all bits of the states."""
    whole = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            whole.update(value.detach().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                whole.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            whole.update(json.dumps(value, default=str).encode())

    for value in values:
        add(value.state_dict())
    return whole.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--wrap", choices=["before", "after"], default="after")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--name", default="")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pace-s", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(3)

    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7)
    averaging: Any = get_ema_multi_avg_fn  # torch does not declare its type
    ema = AveragedModel(net, multi_avg_fn=averaging(0.9), use_buffers=False)
    more: dict[str, Any] = (
        {"state": {"ema": ema, "scaler": scaler}, "sched": scheduler} if options.more else {}
    )

    orchestrator = strata.TrainingOrchestrator(storage_path=options.storage, keep_count=0, save_every_steps=5)
    if options.wrap == "before":
        torch.distributed.init_process_group("gloo")
        model: nn.Module = DistributedDataParallel(net)
        run = orchestrator.init(model=model, optim=optimizer, **more)
    else:
        run = orchestrator.init(model=net, optim=optimizer, **more)
        model = DistributedDataParallel(net)
    forward: Any = torch.compile(model, backend="aot_eager") if options.more else model

    random = torch.Generator().manual_seed(11)
    data = TensorDataset(
        torch.randn(LENGTH, 64, generator=random), torch.randint(8, (LENGTH,), generator=random)
    )
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // run.world.size, shuffle=True)
    say("begun", name=options.name, step=run.step, pid=os.getpid())
    for _ in range(options.epochs):
        for inputs, labels in run.steps(loader):
            loss: Any = nn.functional.cross_entropy(forward(inputs), labels) * run.weight
            optimizer.zero_grad()
            if options.more:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                ema.update_parameters(net)
            else:
                loss.backward()
                optimizer.step()
            say("step", name=options.name, step=run.begun)
            time.sleep(options.pace_s)
    run.close()
    held = [net, optimizer, *([ema, scaler, scheduler] if options.more else [])]
    size_bytes = sum(map(state_bytes, held))
    say("end", name=options.name, step=run.step, digest=digest_of(*held), bytes=size_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
