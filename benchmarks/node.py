"""What a node of 8 ranks costs under `strata run`: how long its ranks take to start, and its memory.

    python -m benchmarks.node [--json FILE] [--slots 8] [--runs 5] [--strata COMMAND]

One coordinator over one etcd member, on this machine. The ranks' script attaches by `strata.connect()`, meets the other ranks
at a barrier, and waits. It does not use torch, so that only Strata's part is measured.

- cold: from the agent's `rank.started` until `strata.connect()` has returned, in newly started processes
- warm: the same, in warm processes, which have done their imports (a rank is killed, the next generation starts)
- pss: proportional memory of the agent and its ranks together, without warm processes

`--strata` is the command of another clone to compare with: `--strata "/there/.venv/bin/strata"`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from strata.devcluster.local_cluster import LocalCluster

SCRIPT: Final = """
import json, os, time
import strata

client = strata.connect()
attached = time.time()
client.barrier("ready")
with open(os.environ["FIGURES"] + f"/{client.generation}-{client.rank}.json", "w") as out:
    json.dump({"attached": attached, "pid": os.getpid()}, out)
time.sleep(1000)
"""
LIMIT_S: Final = 60.0
WARM_S: Final = 4.0
"""Time for the imports of the warm processes."""


class Node:
    """One `strata run`, its log, and the files that its ranks write."""

    def __init__(self, stack: ExitStack, strata: list[str], endpoints: str, slots: int, *more: str) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._slots = slots
        self._figures = folder
        self._log = folder / "log"
        script = folder / "train.py"
        script.write_text(SCRIPT)
        command = [
            *strata,
            "run",
            "-e",
            endpoints,
            "--job",
            f"node-{time.monotonic_ns()}",
            "--slots",
            str(slots),
        ]
        command += ["--log-format=json", *more, "--", sys.executable, str(script)]
        if Path(strata[0]).parent.name == "bin":
            command[-2] = str(Path(strata[0]).with_name("python"))
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "FIGURES": str(folder)}
            )
        stack.callback(self.process.wait)
        stack.callback(self.process.send_signal, signal.SIGINT)

    def ready(self, generation: int) -> dict[int, dict[str, Any]]:
        """Return the file contents of every rank of the generation, once all ranks have written."""
        files = {rank: self._figures / f"{generation}-{rank}.json" for rank in range(self._slots)}
        end = time.monotonic() + LIMIT_S
        while not all(file.exists() and file.stat().st_size for file in files.values()):
            if time.monotonic() > end:
                raise RuntimeError(f"generation {generation} did not come:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.02)
        return {rank: json.loads(file.read_text()) for rank, file in files.items()}

    def starts_ms(self, generation: int) -> list[float]:
        """Return the milliseconds that each rank of the generation took to attach."""
        begun = {}
        for line in self._log.read_text().splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("event") == "rank.started" and entry["generation"] == generation:
                begun[entry["rank"]] = dt.datetime.fromisoformat(entry["timestamp"]).timestamp()
        return [1000 * (one["attached"] - begun[rank]) for rank, one in self.ready(generation).items()]


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += descendants(int(child))
    return found


def pss_kib(pids: list[int]) -> int:
    """Return the proportional memory of processes together."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(found[1]) for text in texts if (found := re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)))


def measure(strata: list[str], endpoints: str, slots: int) -> dict[str, float]:
    """Return the figures of one node that starts cold and one that restarts warm."""
    with ExitStack() as stack:
        node = Node(stack, strata, endpoints, slots, "--no-warm")
        node.ready(1)
        cold = node.starts_ms(1)
        time.sleep(1)
        pss = pss_kib(descendants(node.process.pid))
    with ExitStack() as stack:
        node = Node(stack, strata, endpoints, slots)
        victim = node.ready(1)[slots - 1]["pid"]
        time.sleep(5 + WARM_S)  # run.warm_after_s passes, and then the warm processes import
        os.kill(victim, signal.SIGKILL)
        node.ready(2)
        warm = node.starts_ms(2)
    return {"cold_ms": statistics.median(cold), "warm_ms": statistics.median(warm), "pss_mib": pss / 1024}


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--strata", type=shlex.split, help="the command of another clone; the runs of both alternate"
    )
    options = parser.parse_args()
    own = [str(Path(sys.executable).with_name("strata"))]
    kinds = {"own": own} | ({"other": options.strata} if options.strata else {})
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = LocalCluster.start(Path(folder), etcd_members=1, coordinators=1)
        stack.callback(cluster.kill)
        for _ in range(options.runs):
            for kind, command in kinds.items():
                found[kind].append(measure(command, cluster.endpoints, options.slots))
                print(kind, found[kind][-1], flush=True)
    medians = {
        kind: {what: round(statistics.median(run[what] for run in runs), 1) for what in runs[0]}
        for kind, runs in found.items()
    }
    mine = medians["own"]
    summary = (
        f"a node of {options.slots} ranks: a rank attaches {mine['cold_ms']} ms after its cold start,"
        f" {mine['warm_ms']} ms after a warm one; {mine['pss_mib']} MiB with its agent"
    )
    body: dict[str, Any] = {
        "benchmark": "node",
        "goal": "no worse than the commit before",
        "summary": summary,
    }
    body |= medians
    if "other" in medians:
        ratios = {
            what: [a[what] / b[what] for a, b in zip(found["own"], found["other"], strict=True)]
            for what in mine
        }
        body["ratio"] = {
            what: {
                "median": round(statistics.median(each), 3),
                "spread": [round(min(each), 3), round(max(each), 3)],
            }
            for what, each in ratios.items()
        }
        print(json.dumps(body["ratio"], indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
