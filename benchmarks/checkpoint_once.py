"""Tensors that are equal on all ranks are stored once: the bytes that are stored, and the cost of the comparison.

    python -m benchmarks.checkpoint_once [--json FILE] [--ranks 3] [--megabytes 256] [--rounds 15]

Each rank is a process with the same state, over one coordinator and one etcd member, all on this machine and its
disk. Three worlds save in turn. The first compares the ranks' tensors at each save (the default). The second declares
everything `replicated`, so it compares nothing before it writes. In the third each rank writes its own state. The
time of a save is from the call on the slowest rank to the commit. `cost` is how much longer a save of the first world
takes than one of the second in the same round; both hash and write the same bytes. `share` is the fraction of the
first world's save in which ranks hash and wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks._disk import spread
from benchmarks._once_program import SETTINGS
from strata.devcluster.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).with_name("_once_program.py")
BYTES = 1.02
COST = 0.15


class World:
    """The ranks of one mode."""

    def __init__(
        self, stack: ExitStack, endpoints: str, folder: Path, mode: str, options: argparse.Namespace
    ):
        self.ranks = []
        for rank in range(options.ranks):
            given = {"--ranks": options.ranks, "--storage": folder / mode, "--megabytes": options.megabytes}
            words = [str(word) for pair in given.items() for word in pair]
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), endpoints, mode, f"{mode}-{rank}", "--mode", mode, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            self.ranks.append(process)

    def save(self) -> dict[str, float]:
        """Save once; return the largest figures of all ranks."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write("save\n")
            process.stdin.flush()
        figures = []
        for process in self.ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a rank ended early")
            figures.append(json.loads(line))
        return {key: max(rank[key] for rank in figures) for key in figures[0]}


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    base = ROOT / ".strata"
    base.mkdir(exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in SETTINGS}
    modes = list(SETTINGS)
    with tempfile.TemporaryDirectory(dir=base) as name, ExitStack() as stack:
        cluster = LocalCluster.start(Path(name) / "cluster", etcd_members=1, coordinators=1)
        stack.callback(cluster.kill)
        worlds = {mode: World(stack, cluster.endpoints, Path(name), mode, options) for mode in modes}
        for number in range(options.rounds + 1):
            for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
                os.sync()
                figures = worlds[mode].save()
                if number:  # the first save warms up
                    found[mode].append(figures)
            print(f"round {number} of {options.rounds}", flush=True)

    def median(mode: str, key: str) -> float:
        return statistics.median(each[key] for each in found[mode])

    size = options.megabytes << 20
    bytes_ratio = round(median("compared", "bytes") / size, 4)
    own_ratio = round(median("own", "bytes") / size, 2)
    pairs = zip(found["compared"], found["declared"], strict=True)
    cost, cost_spread = spread([one["took_s"] / other["took_s"] - 1 for one, other in pairs])
    share = round(statistics.median(each["compared_s"] / each["took_s"] for each in found["compared"]), 3)
    result = {
        "benchmark": "checkpoint_once",
        "goal": f"bytes ≤ {BYTES:g} x the state; the comparison costs ≤ {COST:.0%} of a save's time",
        "met": bytes_ratio <= BYTES and cost <= COST,
        "ranks": options.ranks,
        "megabytes": options.megabytes,
        "saves": len(found["compared"]),
        "bytes_of_state": bytes_ratio,
        "bytes_of_state_where_each_writes_its_own": own_ratio,
        "cost": cost,
        "cost_spread": cost_spread,
        "share": share,
        "seconds": {mode: round(median(mode, "took_s"), 3) for mode in SETTINGS},
        "blocked_s": {mode: round(median(mode, "blocked_s"), 3) for mode in SETTINGS},
        "cores": os.cpu_count(),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{options.ranks} ranks, {options.megabytes} MB each: a Full has {bytes_ratio} x the state"
        f" ({own_ratio} x where each rank writes its own); a save takes {median('compared', 'took_s'):.2f} s,"
        f" {cost:+.1%} beside one that compares nothing first ({median('own', 'took_s'):.2f} s where each writes"
        f" its own); {share:.1%} of it is hashing and comparing"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
