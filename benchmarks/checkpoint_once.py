"""What all ranks hold equal is stored once: how many bytes that is, and what the comparison costs.

    python -m benchmarks.checkpoint_once [--json FILE] [--ranks 3] [--megabytes 768] [--rounds 5]

Each rank is a process with the same state, over one coordinator and one etcd member, all on this machine and
its disk. In turn, each in fresh processes: the ranks compare at each save (the default); everything is declared
`replicated`, so nothing is compared before it is written; each rank writes its own. A save takes from the call
on the slowest rank to its commit. `cost` is how much longer a compared save takes than a declared one, which
writes the same bytes; `share` is the part of a compared save in which ranks hash, and wait for each other.
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
from typing import Any

from benchmarks._once_program import SETTINGS
from strata.launch.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).with_name("_once_program.py")
BYTES = 1.02
COST = 0.15


def saves(
    endpoints: str, job: str, folder: Path, mode: str, options: argparse.Namespace
) -> list[list[dict[str, Any]]]:
    """Return what each rank says of each save."""
    with ExitStack() as stack:
        started = []
        for rank in range(options.ranks):
            command = [sys.executable, str(PROGRAM), endpoints, job, f"w{rank}", "--mode", mode]
            given = {
                "--ranks": options.ranks,
                "--storage": folder,
                "--megabytes": options.megabytes,
                "--rounds": options.rounds,
            }
            words = [str(word) for pair in given.items() for word in pair]
            process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        told = []
        for process in started:
            said, _ = process.communicate(timeout=600)
            if process.returncode != 0:
                raise RuntimeError(f"a rank ended with {process.returncode}")
            told.append([json.loads(line) for line in said.splitlines()])
    return told


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    base = ROOT / ".strata"
    base.mkdir(exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in SETTINGS}
    with tempfile.TemporaryDirectory(dir=base) as name, ExitStack() as stack:
        cluster = LocalCluster.start(Path(name) / "cluster", etcd_members=1, coordinators=1)
        stack.callback(cluster.kill)
        for turn in range(options.turns):
            for mode in SETTINGS:
                told = saves(
                    cluster.endpoints, f"{mode}-{turn}", Path(name) / f"{mode}-{turn}", mode, options
                )
                for ranks in zip(*told, strict=True):
                    found[mode].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
                print(f"turn {turn + 1} of {options.turns}: {mode}", flush=True)

    def median(mode: str, key: str) -> float:
        return statistics.median(each[key] for each in found[mode])

    size = options.megabytes << 20
    bytes_ratio = round(median("compared", "bytes") / size, 4)
    own_ratio = round(median("own", "bytes") / size, 2)
    cost = round(median("compared", "took_s") / median("declared", "took_s") - 1, 3)
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
