"""A rank that trains on samples it can check, without torch.

`sum` adds up the samples of all ranks in all completed steps. The ranks exchange their sums at a barrier, in place of
a collective. After a given number of steps `sum` must be the same in any world.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import numpy as np

import strata
from tests.ranks.saying import say

LENGTH = 960
GLOBAL_BATCH = 24


def main() -> int:
    """Train for a number of epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--pace-s", type=float, default=0.01)
    parser.add_argument("--endpoints")
    parser.add_argument("--job")
    parser.add_argument("--worker-id")
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--max-workers", type=int)
    parser.add_argument("--hang-at", type=int, help="the step of generation 1 in which the main thread hangs")
    parser.add_argument("--most", type=int, help="how many samples a rank takes at once")
    parser.add_argument("--workers", type=int, help="read by a torch DataLoader with so many workers")
    parser.add_argument("--frozen", type=int, default=0, help="how many numbers that never change it has")
    options = parser.parse_args()
    orchestrator = strata.TrainingOrchestrator(
        options.endpoints,
        job=options.job,
        worker_id=options.worker_id,
        min_workers=options.min_workers,
        max_workers=options.max_workers,
        storage_path=options.storage,
        save_every_steps=options.every,
    )
    return orchestrator.train(lambda orchestrator: train(orchestrator, options))


def train(orchestrator: strata.TrainingOrchestrator, options: argparse.Namespace) -> int:
    """Train in one generation."""
    state: dict[str, Any] = {"sum": np.zeros(1, dtype=np.int64), "own": [-1]}
    if options.frozen:
        state["frozen"] = np.full(options.frozen, os.getpid(), dtype=np.int64)
    run = orchestrator.init(state=state, global_batch=GLOBAL_BATCH)
    world = run.world
    place = {"rank": world.rank, "generation": world.generation}
    say(
        "begun",
        **place,
        pid=os.getpid(),
        step=run.step,
        world=world.size,
        worker=world.worker_id,
        failure_s=run.saves.failure_s,
        restarts=os.environ.get("TORCHELASTIC_RESTART_COUNT"),
        frozen=sorted({int(number) for number in state.get("frozen", ())}),
    )
    data, accumulate = loader_of(options)
    for _ in range(options.epochs):
        whole: list[int] = []
        for indices in run.steps(data, accumulate=accumulate):
            if run.begun == options.hang_at and world.generation == 1:
                say("hangs", **place)
                time.sleep(1000)
            parts = run.context.barrier("allreduce", json.dumps([int(i) for i in indices]).encode())
            whole += [i for part in parts.values() for i in json.loads(part)]
            state["own"] = [world.rank, len(indices)]  # a plain value that differs from rank to rank
            time.sleep(options.pace_s)
            if run.last_of_step:
                state["sum"] += sum(whole)
                say("step", **place, step=run.begun, epoch=run.epoch, samples=sorted(whole))
                whole = []
    run.close()
    say("end", **place, step=run.step, sum=int(state["sum"][0]), goodput=str(run.goodput()))
    return 0


def loader_of(options: argparse.Namespace) -> tuple[Any, int]:
    """Return the loader of sample numbers, and how many of its batches make a step in the first world."""
    if options.workers is None:
        return strata.ElasticSampler(LENGTH, global_batch=GLOBAL_BATCH, most=options.most, seed=3), 1
    import torch.utils.data  # noqa: PLC0415  # most tests need no torch

    torch.set_num_threads(1)
    loader: Any = torch.utils.data.DataLoader(
        list(range(LENGTH)),  # type: ignore[arg-type]  # a list is a dataset
        batch_size=options.most or 1,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    return loader, 2


if __name__ == "__main__":
    sys.exit(main())
