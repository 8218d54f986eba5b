"""Time until 1,000 agents over mTLS have places in one world, and until all are served again after a replica's kill.

    python -m benchmarks.agents [--json FILE] [--agents 1000] [--processes 8] [--kills 3]

Three coordinators with certificates over three etcd members, all on this machine. Every agent is only the session of
a `strata run`, with its own certificate and 8 slots. The agents run in eight processes that start at the same time.

- world: from the start of the processes until every agent has its place in one world
- back: from the SIGKILL of a replica until every agent is served again, in the same generation; the replica then
  restarts
- CPU and memory: of the eight processes, divided by the agents; a real agent also has its own interpreter
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.held import memory_kib
from benchmarks.session_messages import cpu_s
from strata.config import Credentials
from strata.core.access.authority import Role
from strata.devcluster.local_cluster import LocalCluster
from strata.security.certificates import Authority

PROGRAM = Path(__file__).with_name("_agents_program.py")
START_S: Final = 10.0
BACK_S: Final = 10.0
LIMIT_S: Final = 120.0
POLL_S: Final = 0.05


class Agents:
    """Processes that hold agents, and report their state."""

    def __init__(self, stack: ExitStack, endpoints: str, certs: Path, agents: int, processes: int) -> None:
        self.agents = agents
        self._processes: list[subprocess.Popen[str]] = []
        for number in range(processes):
            first = number * agents // processes
            count = (number + 1) * agents // processes - first
            command = [
                sys.executable,
                str(PROGRAM),
                endpoints,
                str(certs),
                *map(str, (first, count, agents)),
            ]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def state(self) -> tuple[int, int, set[int]]:
        """Return the number of connected agents, the number with a place, and their generations."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline() or '{"connected": 0}'))
        return (
            sum(answer["connected"] for answer in answers),
            sum(answer["placed"] for answer in answers),
            {generation for answer in answers for generation in answer["generations"]},
        )

    def all_served(self, since_s: float) -> tuple[float, set[int]]:
        """Wait until all agents have a place; return the seconds since `since_s`, and their generations."""
        while True:
            connected, placed, generations = self.state()
            took_s = time.monotonic() - since_s
            if placed == self.agents:
                return took_s, generations
            if took_s > LIMIT_S:
                raise RuntimeError(f"after {LIMIT_S:g} s {connected} are connected, {placed} have a place")
            time.sleep(POLL_S)


def secured(stack: ExitStack, folder: Path, agents: int) -> LocalCluster:
    """Start three coordinators that require certificates, and issue those of the agents in `folder`."""
    now = dt.datetime.now(dt.UTC)
    authority = Authority.create(folder / "ca", cluster="default", now=now)
    for number in range(agents):
        authority.issue(folder / f"w-{number}", role=Role.MEMBER, id=f"w-{number}", now=now)

    def options(name: str) -> Sequence[str]:
        authority.issue(folder / name, role=Role.COORDINATOR, id=name, now=now)
        return [f"--tls-{what}-file={folder / name / what}.pem" for what in ("ca", "cert", "key")]

    authority.issue(folder / "viewer", role=Role.VIEWER, id="asking", now=now)
    mine = folder / "viewer"
    viewer = Credentials(ca_file=mine / "ca.pem", cert_file=mine / "cert.pem", key_file=mine / "key.pem")
    cluster = LocalCluster.start(
        folder / "data", etcd_members=3, coordinators=3, options=options, credentials=viewer
    )
    stack.callback(cluster.kill)
    return cluster


def measure(agents: int, processes: int, kills: int) -> dict[str, Any]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        cluster = secured(stack, folder, agents)
        began = time.monotonic()
        its = Agents(stack, cluster.endpoints, folder, agents, processes)
        world_s, generations = its.all_served(began)
        before = sum(map(cpu_s, its.pids))
        time.sleep(10)
        rest_cpu_ms = 100 * (sum(map(cpu_s, its.pids)) - before) / agents
        kib = sum(map(memory_kib, its.pids)) / agents
        backs, cpus = [], []
        for number in range(kills):
            victim = cluster.coordinators[number % len(cluster.coordinators)]
            cpu, killed = sum(map(cpu_s, its.pids)), time.monotonic()
            victim.child.kill()
            while its.state()[0] == agents:
                pass  # the replica's sessions have not ended yet
            back_s, after = its.all_served(killed)
            backs.append(back_s)
            cpus.append(1000 * (sum(map(cpu_s, its.pids)) - cpu) / agents)
            generations |= after
            victim.restart()
            time.sleep(3)
    return {
        "agents": agents,
        "processes": processes,
        "cores": os.cpu_count(),
        "world_s": round(world_s, 2),
        "back_s": [round(each, 2) for each in backs],
        "generations": sorted(generations),
        "rest_cpu_ms_a_second": round(rest_cpu_ms, 3),
        "back_cpu_ms": round(statistics.median(cpus), 2),
        "kib": round(kib, 1),
    }


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    found = measure(options.agents, options.processes, options.kills)
    summary = (
        f"{found['agents']} agents over mTLS: in one world after {found['world_s']} s; a replica killed: all back after"
        f" {max(found['back_s'])} s at most; {found['kib']} KiB and {found['rest_cpu_ms_a_second']} ms CPU a second"
        " an agent at rest"
    )
    body = {
        "benchmark": "agents",
        "goal": f"in one world ≤ {START_S:g} s, back ≤ {BACK_S:g} s, no new generation",
        "met": found["world_s"] <= START_S
        and max(found["back_s"]) <= BACK_S
        and len(found["generations"]) == 1,
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
