"""How long the leader takes to assign shards, how many shards move, and how even the loads are.

    python -m benchmarks.shard_assignment [--json FILE] [--shards 10000] [--members 100] [--runs 60]

There are four kinds of assignments. A first division has other members in each run, so no cached ring applies. Then one
dataset lives through joins, replacements and leaves, one of each kind in a run. Before, all positions on the ring are
computed once, as in any process. Times are the thread's own CPU time, so that other work on the same cores does not
distort them. The reference in the same run is sorting as many random numbers as there are shards.
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
from strata.core.datasets.assignment import divided, owners_of
from strata.core.ids import WorkerId
from strata.core.kv.records import Assignment

GOAL_MS = 2.0
MOVED_GOAL = 1.1
BOUND_GOAL = 1.05
KINDS = ("first", "join", "replace", "leave")


class Measured:
    """The assignments of one kind."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.moved: list[float] = []
        self.max_over_mean: list[float] = []

    def divide(self, workers: list[str], shards: int, old: Assignment | None) -> Assignment:
        """Have the leader divide the shards among these workers, and return the assignment."""
        members = tuple(WorkerId(worker) for worker in sorted(workers))
        began = time.thread_time()
        found = divided(members, shards, old, epoch=1, generation=1)
        self.ms.append(1000 * (time.thread_time() - began))
        owners = owners_of(found)
        self.max_over_mean.append(max(Counter(owners).values()) * len(workers) / shards)
        if old is not None:
            before = owners_of(old)
            left = set(old.workers).difference(workers)
            share = sum(owner in left for owner in before) if left else shards / len(workers)
            self.moved.append(sum(a != b for a, b in zip(before, owners, strict=True)) / share)
        return found

    def result(self) -> dict[str, float]:
        """Return the figures in the result file."""
        figures = {
            "p50_ms": round(statistics.median(self.ms), 2),
            "max_ms": round(max(self.ms), 2),
            "max_over_mean": round(max(self.max_over_mean), 4),
        }
        if self.moved:
            figures["moved_of_its_share"] = round(statistics.median(self.moved), 3)
            figures["moved_of_its_share_max"] = round(max(self.moved), 3)
        return figures


def measure(shards: int, members: int, runs: int) -> dict[str, Any]:
    """Return milliseconds, shares of moved shards and largest loads, for each kind of assignment."""
    rng = random.Random(7)
    numbers = [rng.random() for _ in range(shards)]
    pool = [f"worker-{number:03}" for number in range(3 * members)]
    fresh = [f"new-{number:03}" for number in range(2 * runs)]
    for name in (*pool, *fresh):
        ring.homes([name], shards)
    measured = {kind: Measured() for kind in KINDS}
    sort_ms: list[float] = []
    for _ in range(runs):
        measured["first"].divide(rng.sample(pool, members), shards, None)
        began = time.thread_time()
        sorted(numbers)
        sort_ms.append(1000 * (time.thread_time() - began))
    workers = rng.sample(pool, members)
    assignment = divided(tuple(map(WorkerId, sorted(workers))), shards, None, epoch=1, generation=1)
    listed = 0
    for _ in range(runs):
        for kind in ("join", "replace", "leave"):
            if kind != "join":
                workers.remove(rng.choice(workers))
            if kind != "leave":
                workers.append(fresh.pop())
            assignment = measured[kind].divide(workers, shards, assignment)
            listed = max(listed, sum(map(len, assignment.moved.values())))
    return {
        "sort_p50_ms": round(statistics.median(sort_ms), 2),
        "listed_of_all_shards": round(listed / shards, 3),
        **{kind: found.result() for kind, found in measured.items()},
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
    first, join, replace, leave = (results[kind] for kind in KINDS)
    slowest = max(results[kind]["p50_ms"] for kind in KINDS)
    most_moved = max(found["moved_of_its_share_max"] for found in (join, replace, leave))
    largest = max(results[kind]["max_over_mean"] for kind in KINDS)
    summary = (
        f"{options.shards} shards, {options.members} members: first division {first['p50_ms']} ms; one joins:"
        f" {join['p50_ms']} ms, at most {join['moved_of_its_share_max']} of its share moves; one replaces another:"
        f" {replace['p50_ms']} ms, {replace['moved_of_its_share_max']}; one leaves: {leave['p50_ms']} ms,"
        f" {leave['moved_of_its_share_max']}; largest load {largest} of the mean; exceptions to the ring: at most"
        f" {results['listed_of_all_shards']} of all shards (sorting {options.shards} numbers: {results['sort_p50_ms']} ms)"
    )
    body = {
        "benchmark": "shard_assignment",
        "goal": f"each ≤ {GOAL_MS:g} ms; a change moves ≤ {MOVED_GOAL} x the member's share, load ≤ {BOUND_GOAL} of the mean",
        "met": slowest <= GOAL_MS and most_moved <= MOVED_GOAL and largest <= BOUND_GOAL,
        "summary": summary,
        **results,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
