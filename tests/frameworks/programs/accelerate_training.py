"""A loop of its own with accelerate, which reports its batches, and hangs in the given steps by generation."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import strata
from tests.ranks.saying import say

SAMPLES = 220


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--hang", nargs="*", default=[], help="the step to hang in, by generation")
    options = parser.parse_args()
    generation = int(os.environ["STRATA_GENERATION"])
    hang_at = [int(step) for step in options.hang[generation - 1 : generation]]

    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=7, gamma=0.8)
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=numbers)
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES), x), batch_size=6, shuffle=True)
    run = strata.init(
        model=model,
        optim=optimizer,
        sched=scheduler,
        data=loader,
        global_batch=24,
        storage_path=options.storage,
        save_every_steps=3,
    )
    for _epoch in range(3):
        for ids, inputs in run.steps(accumulate=2):
            if [run.step] == hang_at:
                say("hangs", pid=os.getpid())
                time.sleep(1000)  # until it is killed
            loss = nn.functional.mse_loss(model(inputs), inputs.square().sum(1, keepdim=True))
            accelerator.backward(loss * run.weight)
            facts = {"step": run.step, "epoch": run.epoch, "batch": ids[0].item()}
            say("batch", **facts, ids=ids.tolist(), loss=loss.item(), lr=scheduler.get_last_lr()[0])
            if run.last_of_step:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    run.close()
    found = hashlib.sha256()
    for parameter in net.parameters():
        found.update(parameter.detach().numpy().tobytes())
    say("end", step=run.step, digest=found.hexdigest()[:16])
    return 0


if __name__ == "__main__":
    sys.exit(main())
