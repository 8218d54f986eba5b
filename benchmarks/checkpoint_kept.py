"""Cost of a save after many kept checkpoints, in CPU seconds: the ratio of the cost after 200 to that after 2.

    python -m benchmarks.checkpoint_kept [--json FILE] [--tensors 1000] [--many 200] [--rounds 15]

Four ways: torch's DCP through `StrataWriter` and a `CheckpointManager`, each standalone and under coordinators (one
replica and one etcd member in their own processes). Every checkpoint is kept. Saves alternate between two roots, or
jobs, one with few checkpoints and one with many. The CPU time of a save counts from its call until the search for old
checkpoints has ended, with Python's garbage collector off. The replica's process is measured over the same time.
Figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import strata
from strata.client.checkpoints.manager import CheckpointManager
from strata.devcluster.local_cluster import LocalCluster
from strata.integrations.dcp import JsonSavePlanner, StrataWriter

# torch exports its documented names, but not in a form that a type checker sees
dcp: Any = importlib.import_module("torch.distributed.checkpoint")

ROOT = Path(__file__).resolve().parent.parent
FEW = 2
GOAL = "CPU of a save after 200 kept ÷ after 2: ≤ 1.1, each way"

Save = Callable[[int], None]


def by_dcp(stack: ExitStack, state: dict[str, Any], root: Path, client: Any) -> Save:
    """Return a function that saves a step through DCP."""
    writer = StrataWriter(root, client=client)
    stack.callback(writer.close)

    def save(step: int) -> None:
        dcp.save(state, checkpoint_id=str(step), storage_writer=writer, planner=JsonSavePlanner())
        writer._wait_collected()

    return save


def by_manager(stack: ExitStack, state: dict[str, Any], root: Path, client: Any) -> Save:
    """Return a function that saves a step by a manager."""
    manager = stack.enter_context(CheckpointManager(root, client=client))

    def save(step: int) -> None:
        manager.save_state(state, step).wait()
        manager.wait_until_finished()

    return save


def running_s(pid: int) -> float:
    """Return the seconds that all threads of a process have run."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def measured(save: Save, step: int, replica: int | None) -> tuple[float, float]:
    """Return the CPU seconds of this process, and of the replica, for one save."""
    gc.collect()
    gc.disable()  # the collector would run at about every other save, and so always for the same of the two roots
    try:
        before = running_s(replica) if replica is not None else 0.0
        began = time.process_time()
        save(step)
        own = time.process_time() - began
        return own, running_s(replica) - before if replica is not None else 0.0
    finally:
        gc.enable()


def compared(few: Save, many: Save, kept: int, rounds: int, replica: int | None) -> dict[str, float]:
    """Return the medians of alternating saves and their ratio; `many` starts with `kept` checkpoints."""
    for step in range(1, kept + 1):
        many(step)
    for step in range(1, FEW + 1):
        few(step)
    found: dict[str, list[tuple[float, float]]] = {"few": [], "many": []}
    for number in range(1, rounds + 1):
        # the order alternates, because one save leaves data in caches for the next
        turns = [("few", few, FEW), ("many", many, kept)]
        for name, save, base in turns if number % 2 else turns[::-1]:
            found[name].append(measured(save, base + number, replica))
    own = {name: statistics.median(cpu for cpu, _ in pairs) for name, pairs in found.items()}
    theirs = {name: statistics.median(cpu for _, cpu in pairs) for name, pairs in found.items()}
    result = {
        "few_cpu_ms": round(1000 * own["few"], 2),
        "many_cpu_ms": round(1000 * own["many"], 2),
        "ratio": round(own["many"] / own["few"], 3),
    }
    if replica is not None:
        result |= {
            "few_replica_cpu_ms": round(1000 * theirs["few"], 2),
            "many_replica_cpu_ms": round(1000 * theirs["many"], 2),
        }
    return result


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--many", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    base = ROOT / ".strata"
    base.mkdir(exist_ok=True)
    state = {f"layer{i}.bias": torch.zeros(8) for i in range(args.tensors)}
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=base) as name, ExitStack() as stack:
        folder = Path(name)
        cluster = LocalCluster.start(folder / "cluster", etcd_members=1, coordinators=1)
        stack.callback(cluster.kill)
        for way, make in (("dcp", by_dcp), ("manager", by_manager)):
            for coordinated in (False, True):
                title = f"{way}, coordinators" if coordinated else f"{way}, alone"
                with ExitStack() as inner:
                    saves = []
                    for count in ("few", "many"):
                        client = None
                        if coordinated:
                            client = inner.enter_context(
                                strata.connect(cluster.endpoints, job=f"{way}-{count}", worker_id="w0")
                            )
                        saves.append(make(inner, state, folder / title / count, client))
                    replica = cluster.coordinators[0].child.pid if coordinated else None
                    found[title] = compared(saves[0], saves[1], args.many, args.rounds, replica)
                print(f"{title}: {found[title]}", flush=True)
    met = all(each["ratio"] <= 1.1 for each in found.values())
    summary = (
        f"{args.tensors} small tensors, CPU of a save after {args.many} kept ÷ after {FEW}: "
        + "; ".join(f"{title} {each['ratio']}" for title, each in found.items())
        + "; CPU of the replica for one save: "
        + "; ".join(
            f"{title} {each['few_replica_cpu_ms']} → {each['many_replica_cpu_ms']} ms"
            for title, each in found.items()
            if "few_replica_cpu_ms" in each
        )
    )
    print(summary)
    result = {
        "benchmark": "checkpoint_kept",
        "tensors": args.tensors,
        "many": args.many,
        "rounds": args.rounds,
        "ways": found,
        "goal": GOAL,
        "met": met,
        "summary": summary,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
