"""A rank that fine-tunes under DistributedDataParallel, saves every few steps, and reports all events for the judge.

Most of its net is frozen, so an Incremental saves much less than a Full. It trains up to the step that the file
`--until` names; the test may write this file while it trains.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import strata
from tests.ranks.ddp import make_net
from tests.ranks.saying import say

FROZEN = (1024, 2048)
"""The size of each of the two frozen tensors: 8 MiB, one chunk of an Incremental."""
BATCH = 4
SAMPLES = 400
_COMMITTED = re.compile(r"step (\d+) is committed")


class Announcer(logging.Handler):
    """Reports the begin of a save (as a part of the state) and the commit of a step (as a log handler)."""

    def state_dict(self) -> dict[str, Any]:
        say("saving")
        return {"of": "announcer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is nothing to restore."""

    def emit(self, record: logging.LogRecord) -> None:
        if found := _COMMITTED.match(record.getMessage()):
            say("committed", step=int(found[1]))


def make_tuned_net() -> nn.Module:
    """Return a net most of whose parameters never change."""
    net = make_net()
    for name in ("first", "second"):
        frozen = nn.Parameter(torch.randn(FROZEN), requires_grad=False)
        net.register_parameter(f"frozen_{name}", frozen)
    return net


def digest(net: nn.Module, optim: torch.optim.Optimizer, *, whole: bool = False) -> str:
    """Return a digest of the values that a step changes; `whole` adds the frozen tensors and the generator."""
    found = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        if whole or not name.startswith("frozen"):
            found.update(tensor.numpy().tobytes())
    for state in optim.state.values():
        found.update(state["momentum_buffer"].numpy().tobytes())
    if whole:
        found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()[:16]


def last_step(until: Path) -> float:
    """Return the last step, or infinity until the test has decided it."""
    return int(until.read_text()) if until.exists() else float("inf")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--until", type=Path, required=True, help="a file that names the last step")
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--full-every", type=int, required=True)
    parser.add_argument("--keep-count", type=int, required=True)
    parser.add_argument("--pace-s", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    announcer = Announcer()
    logging.getLogger("strata.checkpoint").addHandler(announcer)
    logging.getLogger("strata.checkpoint").setLevel(logging.INFO)

    net = make_tuned_net()
    optim = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    torch.distributed.init_process_group("gloo")
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.2)
    say("restoring", pid=os.getpid())
    run = strata.init(
        model=ddp,
        optim=optim,
        state={"announcer": announcer},
        storage_path=options.storage,
        save_every_steps=options.save_every,
        full_every=options.full_every,
        keep_count=options.keep_count,
    )
    say("begun", step=run.step)
    numbers = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 32, generator=numbers), torch.randn(SAMPLES, 8, generator=numbers)
    )
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in itertools.takewhile(lambda _: run.step < last_step(options.until), itertools.count()):
        for inputs, targets in run.steps(loader):
            optim.zero_grad()
            ((ddp(inputs) - targets) ** 2).mean().backward()
            optim.step()
            say("step", step=run.begun, digest=digest(net, optim))
            if run.begun >= last_step(options.until):
                break
            time.sleep(options.pace_s)
    run.close()
    say("end", step=run.step, digest=digest(net, optim, whole=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
