"""Cost of Strata's order of samples for each batch, relative to a plain DataLoader, in the training of the digits example.

    python -m benchmarks.elastic_order [--json FILE] [--epochs 15] [--batch 10]

Epochs of a plain shuffled DataLoader, of the same samples in Strata's order, and of `run.steps` take turns, with the same
net. Under `run.steps` a step of one small batch also pays for the counting, timing and reporting of steps; nothing is
saved. Measured without loader workers, where the main thread makes each batch, and with one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import strata
from strata.training.loop.feeds import Feeding
from strata.training.save.state import Position

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))

from digits import Digits, Net  # the example is no package

GOAL = 1.02


def train(net: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> float:
    """Return the seconds of one epoch."""
    loss_of = nn.CrossEntropyLoss()
    began = time.perf_counter()
    for images, labels in batches:
        optimizer.zero_grad()
        loss_of(net(images), labels).backward()
        optimizer.step()
    return time.perf_counter() - began


def ratios(workers: int, *, epochs: int, batch: int) -> dict[str, float]:
    """Return the times of a batch in microseconds, and the median ratios of neighbouring epochs."""
    torch.manual_seed(0)
    data = Digits(train=True)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(
        data, batch_size=batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    feed = Feeding(rank=0, world_size=1, global_batch=None, seed=0, uneven=True, saved={}).feed(loader, 1)
    took: dict[str, list[float]] = {"plain": [], "order": [], "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        run = strata.init(model=net, optim=optimizer, storage_path=folder, save_every_steps=10**9)
        for epoch in range(epochs + 1):
            ways: dict[str, Iterable[Any]] = {
                "plain": loader,
                "order": (fed.batch for fed in feed.epoch(Position(epoch=epoch))),
                "steps": run.steps(loader),
            }
            for name in (*ways, *ways)[epoch % 3 : epoch % 3 + 3]:
                took[name].append(train(net, optimizer, ways[name]))
        run.abandon("measured", code=0)
    times = {name: each[1:] for name, each in took.items()}  # the first epoch warms up
    return {
        **{
            f"{name}_us": round(1e6 * statistics.median(each) / len(loader), 1)
            for name, each in times.items()
        },
        **{
            f"{name}_ratio": round(statistics.median(map(truediv, times[name], times["plain"])), 4)
            for name in ("order", "steps")
        },
    }


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {str(workers): ratios(workers, epochs=options.epochs, batch=options.batch) for workers in (0, 1)}
    summary = "digits, batches of {}: {}".format(
        options.batch,
        "; ".join(
            f"{name} loader workers: {one['order_us']:g} µs a batch in Strata's order, {one['order_ratio']:.3f} x a plain"
            f" DataLoader ({one['plain_us']:g} µs); all of run.steps {one['steps_ratio']:.3f} x"
            for name, one in found.items()
        ),
    )
    body = {
        "benchmark": "elastic_order",
        "goal": f"the order ≤ {GOAL:g} x a plain DataLoader",
        "met": all(one["order_ratio"] <= GOAL for one in found.values()),
        "summary": summary,
        "workers": found,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body))
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
