"""How many messages a coordinator serves on its session streams, against a bare gRPC stream server.

    python -m benchmarks.session_messages [--json FILE] [--streams 16] [--messages 20000] [--runs 5]

Two client processes hold the streams. Both servers run grpc.aio on uvloop, get the same messages, and take turns.
Only the server's own CPU time counts, so that clients on the same cores do not distort the figures:

- progress: Progress messages, which get no answer (each batch ends with a call that waits); bare: read and discarded
- echo: Call(GetWorld) and its Reply, 8 in flight on a stream; bare: read, and the reply written
- unary: Members.Heartbeat, 8 in flight on a channel; bare: an immediate answer
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from strata.devcluster.local_cluster import LocalCluster

PROGRAM = Path(__file__).with_name("_session_program.py")
GOAL = 0.85
KINDS = ("progress", "echo", "unary")


class Peer:
    """A process of `_session_program`; it exchanges lines of JSON."""

    def __init__(self, stack: ExitStack, *arguments: object) -> None:
        command = [sys.executable, str(PROGRAM), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        self.first = self.answer()

    def tell(self, line: str) -> None:
        """Send the process a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Return the next line from the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the benchmark ended early")
        return json.loads(line)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rate(clients: list[Peer], pid: int, kind: str, messages: int) -> float:
    """Return the messages per second of server CPU."""
    before = cpu_s(pid)
    for client in clients:
        client.tell(kind)
    for client in clients:
        client.answer()
    return messages / (cpu_s(pid) - before)


def measure(streams: int, messages: int, runs: int) -> dict[str, Any]:
    """Return, for each kind, both rates and their ratio: medians over alternating runs."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = LocalCluster.start(Path(folder), etcd_members=1, coordinators=1)
        stack.callback(cluster.kill)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            bare_address = f"127.0.0.1:{probe.getsockname()[1]}"
        bare = Peer(stack, "server", bare_address, streams)
        pids = {"strata": cluster.coordinators[0].child.pid, "bare": bare.process.pid}
        half = messages // streams
        clients = {
            server: [Peer(stack, "client", address, number, streams // 2, half, streams) for number in (0, 1)]
            for server, address in (("strata", cluster.coordinators[0].address), ("bare", bare_address))
        }
        total = half * (streams // 2) * 2
        found: dict[str, dict[str, list[float]]] = {kind: {"strata": [], "bare": []} for kind in KINDS}
        for run in range(runs + 1):
            for kind in KINDS:
                for server, pid in pids.items():
                    measured = rate(clients[server], pid, kind, total)
                    if run:  # the first run warms everything up
                        found[kind][server].append(measured)
    return {
        kind: {
            "per_core_s": round(statistics.median(rates["strata"])),
            "bare_per_core_s": round(statistics.median(rates["bare"])),
            "ratio": round(
                statistics.median(a / b for a, b in zip(rates["strata"], rates["bare"], strict=True)), 3
            ),
        }
        for kind, rates in found.items()
    }


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--messages", type=int, default=40_000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    results = measure(options.streams, options.messages, options.runs)
    summary = "; ".join(
        f"{kind}: {r['per_core_s']} messages/s per core, {r['ratio']:.2f} of the bare server"
        for kind, r in results.items()
    )
    body = {
        "benchmark": "session_messages",
        "goal": f"≥ 10,000/s per core on streams, and ≥ {GOAL} of the bare server",
        "met": all(
            r["ratio"] >= GOAL and (kind == "unary" or r["per_core_s"] >= 10_000)
            for kind, r in results.items()
        ),
        "summary": summary,
        **results,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
