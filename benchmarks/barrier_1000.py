"""How long a barrier of 1,000 ranks takes: with one connection for each rank, and with one for each host of 8 ranks.

    python -m benchmarks.barrier_1000 [--json FILE] [--rounds 50] [--runs 5]

Like `benchmarks.barrier`, with three coordinators over three etcd members and four client processes on this machine:

- single: 1,000 members of one rank; from the last arrival sent to the last release received
- hosts: 125 members of 8 ranks, each with one arrival for all its ranks; from the first arrival sent to the last
  release received

TCPStore is not a baseline here, because it fails with a thousand threads on small machines.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.barrier import measure

SINGLE_GOAL_MS = 100.0
HOSTS_GOAL_MS = 40.0


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    hosts = measure(125, options.rounds, options.runs, 4, slots=8, baselines=False)["strata"]
    print(f"hosts: {hosts}", flush=True)
    single = measure(1000, options.rounds, options.runs, 4, baselines=False)["strata"]
    print(f"single: {single}", flush=True)
    summary = (
        f"1,000 connections: last arrival to last release p50 {single['release']['p50_ms']} ms, p99"
        f" {single['release']['p99_ms']} ms; 125 hosts of 8 ranks: burst p50 {hosts['burst']['p50_ms']} ms,"
        f" p99 {hosts['burst']['p99_ms']} ms"
    )
    body = {
        "benchmark": "barrier_1000",
        "goal": f"release ≤ {SINGLE_GOAL_MS:g} ms; with hosts of 8 burst ≤ {HOSTS_GOAL_MS:g} ms (p99)",
        "met": single["release"]["p99_ms"] <= SINGLE_GOAL_MS and hosts["burst"]["p99_ms"] <= HOSTS_GOAL_MS,
        "summary": summary,
        "single": single,
        "hosts": hosts,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
