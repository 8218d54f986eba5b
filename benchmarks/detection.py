"""Time until the survivors get the new generation after a death, under `strata run` on a local cluster.

    python -m benchmarks.detection [--json FILE] [--rounds 30] [--detect-s 5]

Two nodes train. Each rank has forked DataLoader workers, which inherit the rank's sockets and outlive the rank for a
moment. One round harms the first node and measures the time until the second node's session gets the new generation:

- rank killed: SIGKILL to its rank's process
- rank frozen: SIGSTOP to its rank's process; the agent sees the kernel's state of the process (a third of the rounds)
- node killed: SIGKILL to its agent; the ranks die with their agent (a third of the rounds)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from strata.devcluster.local_cluster import LocalCluster
from tests.processes import Event, Record, Talker

ROOT = Path(__file__).resolve().parent.parent
KILLED_P99_S = 1.5
FROZEN_SLACK_S = 1.0
LIMIT_S = 60.0
WORLDS = frozenset({"world.joining", "world.waiting"})
"""Log events of an agent that gets a newer generation."""


class Nodes:
    """Two nodes of one job, and their output."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.record = Record()
        self._cluster = cluster
        self._talkers = {name: self._start(name) for name in ("a", "b")}

    def _start(self, name: str) -> Talker:
        command = [sys.executable, "-m", "strata", "run", "--endpoints", self._cluster.endpoints]
        command += ["--job", "detection", "--worker-id", name, "--min-workers", "2", "--log-format", "json"]
        command += ["--max-no-progress-generations", "1000000"]
        command += ["--", sys.executable, str(ROOT / "tests" / "ranks" / "loader.py"), "--epochs", "1000000"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return Talker(command, name=name, record=self.record, env=env)

    def settled(self) -> int:
        """Return the newest generation once both ranks have trained in it."""

        def both(events: list[Event]) -> int:
            newest = max((int(e["generation"]) for e in events if e["event"] == "epoch"), default=0)
            there = {e["source"] for e in events if e["event"] == "epoch" and e["generation"] == newest}
            world = max((int(e["generation"]) for e in events if e["event"] in WORLDS), default=0)
            return newest if there == {"a", "b"} and world == newest else 0

        return self.record.until("two ranks that train", both, limit_s=LIMIT_S)

    def rank_of_a(self, generation: int) -> int:
        """Return the process id of the first node's rank."""
        return int(self.record.of("start", source="a", generation=generation)[0]["pid"])

    def kill_a(self) -> None:
        """SIGKILL the first node's agent."""
        os.kill(self._talkers["a"].pid, signal.SIGKILL)

    def start_a(self) -> None:
        """Start the first node again."""
        self._talkers["a"].join()
        self._talkers["a"] = self._start("a")

    def notified(self, after: int) -> float:
        """Return the moment at which the second node got a generation newer than `after`."""

        def newer(events: list[Event]) -> float:
            for event in events:
                if event["event"] in WORLDS and event["source"] == "b" and int(event["generation"]) > after:
                    return float(event["heard"])
            return 0.0

        return self.record.until("a new generation", newer, limit_s=LIMIT_S)

    def end(self) -> None:
        """Kill everything."""
        for talker in self._talkers.values():
            talker.child.kill()
            talker.join()


def measure(nodes: Nodes, rounds: int, harm: Callable[[int], None], mend: Callable[[], None]) -> list[float]:
    """Return, for each round, the seconds from the signal to the new generation, sorted."""
    found = []
    for _ in range(rounds):
        generation = nodes.settled()
        began = time.monotonic()
        harm(generation)
        found.append(nodes.notified(generation) - began)
        mend()
    return sorted(found)


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """Return the figures of the table for sorted measurements."""

    def percentile(p: float) -> float:
        return round(seconds[math.ceil(p * len(seconds)) - 1], 3)

    return {
        "p50_s": percentile(0.5),
        "p99_s": percentile(0.99),
        "max_s": round(seconds[-1], 3),
        "rounds": len(seconds),
    }


def run(rounds: int, detect_s: float) -> dict[str, dict[str, float]]:
    """Return the distribution of each kind of death."""
    few = max(1, rounds // 3)
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster.start(
            Path(folder), etcd_members=1, coordinators=3, detect_s=detect_s, fsync=False
        )
        nodes = Nodes(cluster)
        try:
            return {
                "rank_killed": distribution(
                    measure(
                        nodes,
                        rounds,
                        lambda generation: os.kill(nodes.rank_of_a(generation), signal.SIGKILL),
                        lambda: None,
                    )
                ),
                "rank_frozen": distribution(
                    measure(
                        nodes,
                        few,
                        lambda generation: os.kill(nodes.rank_of_a(generation), signal.SIGSTOP),
                        lambda: None,
                    )
                ),
                "node_killed": distribution(
                    measure(nodes, few, lambda _generation: nodes.kill_a(), nodes.start_a)
                ),
            }
        finally:
            nodes.end()
            cluster.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one line a kind of death, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--detect-s", type=float, default=5.0)
    args = parser.parse_args(argv)
    kinds = run(args.rounds, args.detect_s)
    frozen_s = args.detect_s + FROZEN_SLACK_S
    met = kinds["rank_killed"]["p99_s"] <= KILLED_P99_S and kinds["rank_frozen"]["max_s"] <= frozen_s
    for kind, d in kinds.items():
        print(
            f"{kind}: p50 {d['p50_s']:.3f} s, p99 {d['p99_s']:.3f} s, max {d['max_s']:.3f} s"
            f" ({d['rounds']} rounds)"
        )
    summary = (
        f"rank killed: p99 {kinds['rank_killed']['p99_s']:.2f} s; rank frozen (detect_s {args.detect_s:g}): "
        f"max {kinds['rank_frozen']['max_s']:.2f} s; node killed: max {kinds['node_killed']['max_s']:.2f} s"
    )
    print(summary)
    result = {
        "benchmark": "detection",
        "detect_s": args.detect_s,
        **kinds,
        "summary": summary,
        "goal": f"rank killed p99 ≤ {KILLED_P99_S} s, rank frozen ≤ {frozen_s:g} s",
        "met": met,
        "versions": {"python": platform.python_version()},
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
