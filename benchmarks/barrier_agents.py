"""How long a barrier of 104 ranks takes through 13 agents, three coordinators and three etcd members.

    python -m benchmarks.barrier_agents [--json FILE] [--hosts 13] [--slots 8] [--rounds 200] [--runs 5]

Each host is a client process with 8 ranks, one socket each, and a real agent in its own process. Everything runs on
this machine, etcd with fsync. In a round all ranks arrive at the same time. *Burst* is the time from the first
arrival sent to the last release received.

Two more figures are measured in turn with the burst, in the same run:

- tcpstore: the barrier of `torch.distributed.elastic` over one TCPStore (one process, nothing durable), with as many
  connections from as many processes
- commit: one write to etcd, such as the outcome of a round, by a separate client while nothing else runs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.barrier import Clients, quantile, summarised
from strata.core.kv.txn import Put, Txn
from strata.devcluster.local_cluster import LocalCluster
from strata.etcd import EtcdStore

GOAL: Final = 1.3


def commits_ms(endpoints: Sequence[str], rounds: int) -> list[float]:
    """Return the milliseconds of each of `rounds` consecutive writes to etcd."""

    async def write() -> list[float]:
        took = []
        async with await EtcdStore.connect(endpoints) as store:
            for number in range(rounds):
                began = time.monotonic()
                await store.execute(Txn().then(Put(key="/bench", value=b"%d" % number)))
                took.append(1000 * (time.monotonic() - began))
        return took

    return asyncio.run(write())


def measure(hosts: int, slots: int, rounds: int, runs: int, *, fsync: bool) -> dict[str, Any]:
    """Return the figures of all kinds, measured in turns."""
    ranks = hosts * slots
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = LocalCluster.start(Path(folder), etcd_members=3, coordinators=3, fsync=fsync)
        stack.callback(cluster.kill)
        ours = Clients(stack, "ranks", hosts, ranks, rounds, cluster.endpoints)
        theirs = Clients(stack, "tcpstore", hosts, ranks, rounds, str(Path(folder) / "port"))
        ours.run()  # the first rounds warm everything up
        theirs.run()
        found: dict[str, list[list[dict[str, float]]]] = {"strata": [], "tcpstore": []}
        commits = []
        for _ in range(runs):
            found["strata"].append(ours.run())
            found["tcpstore"].append(theirs.run())
            commits.append(commits_ms(cluster.etcd.endpoints, rounds))
    p99s = {
        kind: [quantile([each["burst"] for each in run], 0.99) for run in its] for kind, its in found.items()
    }
    ratios = sorted(mine / its for mine, its in zip(p99s["strata"], p99s["tcpstore"], strict=True))
    return {
        **{kind: summarised(results) for kind, results in found.items()},
        "commit": {
            "p50_ms": round(statistics.median(quantile(run, 0.5) for run in commits), 2),
            "p99_ms": round(statistics.median(quantile(run, 0.99) for run in commits), 2),
        },
        "p99_ratio": {
            "median": round(statistics.median(ratios), 2),
            "of_runs": [round(r, 2) for r in ratios],
        },
    }


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hosts", type=int, default=13)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-fsync", action="store_true", help="let etcd not wait for the disk")
    options = parser.parse_args()
    found = measure(options.hosts, options.slots, options.rounds, options.runs, fsync=not options.no_fsync)
    burst, store = found["strata"]["burst"], found["tcpstore"]["burst"]
    summary = (
        f"{options.hosts * options.slots} ranks of {options.hosts} agents: burst p50 {burst['p50_ms']} ms, p99"
        f" {burst['p99_ms']} ms; TCPStore p50 {store['p50_ms']} ms, p99 {store['p99_ms']} ms; etcd's commit alone p50"
        f" {found['commit']['p50_ms']} ms, p99 {found['commit']['p99_ms']} ms"
    )
    body = {
        "benchmark": "barrier_agents",
        "goal": f"p99 of the burst ≤ {GOAL:g} x TCPStore's",
        "met": found["p99_ratio"]["median"] <= GOAL,
        "summary": summary,
        **found,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
