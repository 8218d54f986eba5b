"""How long a barrier of 100 members takes through three coordinators over three etcd members.

    python -m benchmarks.barrier [--json FILE] [--members 100] [--rounds 200] [--runs 5] [--clients 4]
                                [--slots 1] [--no-baselines]

Every member is one connection with `--slots` ranks; four client processes have the connections. Clients, coordinators
and etcd (with fsync) all run on this machine. In a round all members arrive at the same time.

- burst: from the first arrival sent to the last release received
- release: from the last arrival sent to the last release received

Two baselines alternate with this barrier, with as many connections from as many processes: the barrier of
`torch.distributed.elastic` over one TCPStore, and the same clients with one bare gRPC server in Python that counts
arrivals and releases all. Both baselines are one process, without durable state.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from strata.devcluster.local_cluster import LocalCluster

CLIENT = Path(__file__).with_name("_barrier_client.py")
BARE = Path(__file__).with_name("_barrier_bare.py")
GOAL_MS = 20.0
REQUIRED_MS = 50.0


class Clients:
    """Processes that make the same rounds at the same time; they exchange lines of JSON."""

    def __init__(
        self, stack: ExitStack, kind: str, count: int, members: int, rounds: int, *extra: str
    ) -> None:
        shares = [members // count + (number < members % count) for number in range(count)]
        self._processes: list[subprocess.Popen[str]] = []
        for number, share in enumerate(shares):
            command = [
                sys.executable,
                str(CLIENT),
                kind,
                str(number),
                str(share),
                str(members),
                str(rounds),
                *extra,
            ]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            self._processes.append(process)
        self._answers()

    def run(self) -> list[dict[str, float]]:
        """Make all rounds once; return the milliseconds of each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        rounds = zip(*self._answers(), strict=True)
        return [
            {
                "burst": 1000 * (max(r["heard"] for r in parts) - min(r["first"] for r in parts)),
                "release": 1000 * (max(r["heard"] for r in parts) - max(r["last"] for r in parts)),
            }
            for parts in rounds
        ]

    def _answers(self) -> list[Any]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a client ended early")
            answers.append(json.loads(line))
        return answers


def bare_server(stack: ExitStack, members: int) -> str:
    """Start the server that only counts; return its address."""
    command = [sys.executable, str(BARE), str(members)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as a `share` of all values."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def summarised(runs: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Return the median over the runs of each run's quantiles, and the spread of the p99."""
    found: dict[str, Any] = {}
    for what in ("burst", "release"):
        p50s = [quantile([r[what] for r in run], 0.50) for run in runs]
        p99s = [quantile([r[what] for r in run], 0.99) for run in runs]
        found[what] = {
            "p50_ms": round(statistics.median(p50s), 2),
            "p99_ms": round(statistics.median(p99s), 2),
            "p99_of_runs_ms": [round(p99, 2) for p99 in sorted(p99s)],
        }
    return found


def measure(
    members: int,
    rounds: int,
    runs: int,
    clients: int,
    *,
    slots: int = 1,
    fsync: bool = True,
    baselines: bool = True,
) -> dict[str, Any]:
    """Return the figures of all kinds, measured in turns."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = LocalCluster.start(Path(folder), etcd_members=3, coordinators=3, fsync=fsync)
        stack.callback(cluster.kill)
        clients_of = {
            "strata": Clients(stack, "strata", clients, members, rounds, cluster.endpoints, str(slots))
        }
        if baselines:
            bare = bare_server(stack, members)
            clients_of["bare"] = Clients(stack, "strata", clients, members, rounds, bare, str(slots))
            with suppress(RuntimeError):  # if torch is not installed
                clients_of["tcpstore"] = Clients(
                    stack, "tcpstore", clients, members, rounds, str(Path(folder) / "port")
                )
        found: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in clients_of}
        for grpc_clients in [clients_of[kind] for kind in clients_of if kind != "tcpstore"]:
            grpc_clients.run()  # the first rounds warm everything up
        for _ in range(runs):
            for kind, its in clients_of.items():
                found[kind].append(its.run())
    return {kind: summarised(results) for kind, results in found.items()}


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--slots", type=int, default=1, help="ranks of a member")
    parser.add_argument("--no-baselines", action="store_true", help="without TCPStore and bare gRPC")
    parser.add_argument("--no-fsync", action="store_true", help="let etcd not wait for the disk")
    options = parser.parse_args()
    results = measure(
        options.members,
        options.rounds,
        options.runs,
        options.clients,
        slots=options.slots,
        fsync=not options.no_fsync,
        baselines=not options.no_baselines,
    )
    ours = results["strata"]["burst"]
    summary = f"{options.members} members: burst p50 {ours['p50_ms']} ms, p99 {ours['p99_ms']} ms"
    beside = [
        f"{name} p50 {results[kind]['burst']['p50_ms']} ms, p99 {results[kind]['burst']['p99_ms']} ms"
        for kind, name in (("bare", "a bare gRPC server"), ("tcpstore", "TCPStore"))
        if kind in results
    ]
    if beside:
        summary += f" ({'; '.join(beside)})"
    body = {
        "benchmark": "barrier",
        "goal": f"p99 of the burst ≤ {GOAL_MS:g} ms, < {REQUIRED_MS:g} ms required",
        "met": ours["p99_ms"] <= GOAL_MS,
        "required_met": ours["p99_ms"] < REQUIRED_MS,
        "summary": summary,
        **results,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
