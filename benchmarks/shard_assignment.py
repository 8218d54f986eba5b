"""How long the leader takes to assign shards when a member leaves or joins, and how many shards move.

    python -m benchmarks.shard_assignment [--json FILE] [--shards 10000] [--members 100] [--runs 60]

Every run adds or removes one member, so no cached result of an earlier run applies. Positions on the ring are the
same in every process and are computed once. Times are the thread's own CPU time, so that other work on the same cores
does not distort them. The reference in the same run is sorting as many random numbers as there are shards.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from strata.core.datasets import ring

GOAL_MS = 2.0
MOVED_GOAL = 1.1
BOUND_GOAL = 1.05


def measure(shards: int, members: int, runs: int) -> dict[str, Any]:
    """Return milliseconds and shares of moved shards, for leaves and for joins."""
    rng = random.Random(7)
    names = [f"worker-{number:03}" for number in range(members)]
    owners = ring.owners(names, shards, ring.assign(names, shards))
    numbers = [rng.random() for _ in range(shards)]
    found: dict[str, dict[str, list[float]]] = {
        kind: {"ms": [], "sort_ms": [], "moved": [], "max_over_mean": []} for kind in ("leave", "join")
    }
    for run in range(runs):
        for kind, results in found.items():
            departed = rng.choice(names)
            after = [n for n in names if n != departed] if kind == "leave" else [*names, f"new-{run:03}"]
            began = time.thread_time()
            moved = ring.assign(after, shards, owners)
            results["ms"].append(1000 * (time.thread_time() - began))
            began = time.thread_time()
            sorted(numbers)
            results["sort_ms"].append(1000 * (time.thread_time() - began))
            then = ring.owners(after, shards, moved)
            share = owners.count(departed) if kind == "leave" else shards / len(after)
            changed = sum(a != b for a, b in zip(owners, then, strict=True))
            results["moved"].append(changed / share)
            results["max_over_mean"].append(max(Counter(then).values()) * len(after) / shards)
    return {
        kind: {
            "p50_ms": round(statistics.median(results["ms"]), 2),
            "max_ms": round(max(results["ms"]), 2),
            "sort_p50_ms": round(statistics.median(results["sort_ms"]), 2),
            "moved_of_its_share": round(statistics.median(results["moved"]), 3),
            "moved_of_its_share_max": round(max(results["moved"]), 3),
            "max_over_mean": round(max(results["max_over_mean"]), 3),
        }
        for kind, results in found.items()
    }


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--runs", type=int, default=60)
    options = parser.parse_args()
    results = measure(options.shards, options.members, options.runs)
    leave, join = results["leave"], results["join"]
    summary = (
        f"{options.shards} shards, {options.members} members: one leaves: {leave['p50_ms']} ms,"
        f" {leave['moved_of_its_share']} of its share moves; one joins: {join['p50_ms']} ms,"
        f" {join['moved_of_its_share']} of its share; largest load {leave['max_over_mean']} of the mean"
        f" (sorting {options.shards} numbers: {leave['sort_p50_ms']} ms)"
    )
    body = {
        "benchmark": "shard_assignment",
        "goal": f"≤ {GOAL_MS:g} ms; a departing member moves ≤ {MOVED_GOAL} x its share, load ≤ {BOUND_GOAL} of the mean",
        "met": leave["p50_ms"] <= GOAL_MS
        and leave["moved_of_its_share"] <= MOVED_GOAL
        and leave["max_over_mean"] <= BOUND_GOAL,
        "summary": summary,
        **results,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
