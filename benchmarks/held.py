"""Cost of idle members: memory and CPU of the replicas, and writes to etcd.

    python -m benchmarks.held [--json FILE] [--seconds 20] [--many 10000]

Three coordinators over three etcd members, all on this machine. Two settings:

- at rest: 100 members, one connection each. Figures: the CPU of each replica, and the growth of etcd's revision.
- many: 10,000 members over the three replicas, in jobs of 1,000, with 50 streams a connection. A simulated member is
  only its stream and its session at the replica. Memory is the growth of the replicas' memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.session_messages import cpu_s
from strata.core.kv.txn import Range
from strata.devcluster.local_cluster import LocalCluster
from strata.etcd import EtcdStore

PROGRAM = Path(__file__).with_name("_held_program.py")
REST_CPU_PERCENT = 2.0
REST_WRITES_A_MINUTE = 60.0
MEMBER_KIB = 60.0
MEMBER_CPU_MS = 0.1
STREAMS = 50
"""Streams on a connection; a replica accepts 64 (docs/security.md)."""


def memory_kib(pid: int) -> int:
    """Return the private resident memory of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1])
    raise RuntimeError("the kernel reports no private memory")


def revision(endpoints: Sequence[str]) -> int:
    """Return etcd's revision, which every write increases by one."""

    async def ask() -> int:
        async with await EtcdStore.connect(endpoints) as store:
            return (await store.read(Range(key="/"))).revision

    return asyncio.run(ask())


def hold(
    stack: ExitStack, endpoints: str, members: int, job_size: int, a_channel: int, processes: int
) -> list[subprocess.Popen[str]]:
    """Start idle members; return once all are in their worlds."""
    started = []
    share = members // processes
    for number in range(processes):
        first = number * share
        count = share if number < processes - 1 else members - first
        command = [sys.executable, str(PROGRAM), endpoints, *map(str, (first, count, job_size, a_channel))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        started.append(process)
    for process in started:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("a process that holds members ended early")
    return started


def watched(pids: Sequence[int], seconds: float) -> list[float]:
    """Return the CPU seconds per second of each process over a while."""
    before, began = [cpu_s(pid) for pid in pids], time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began
    return [(cpu_s(pid) - was) / took_s for pid, was in zip(pids, before, strict=True)]


def measure(members: int, job_size: int, a_channel: int, seconds: float) -> dict[str, Any]:
    """Return the cost of `members` idle members."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = LocalCluster.start(Path(folder), etcd_members=3, coordinators=3)
        stack.callback(cluster.kill)
        pids = [coordinator.child.pid for coordinator in cluster.coordinators]
        time.sleep(2)  # for the election and the first work of the controllers
        empty_kib = sum(map(memory_kib, pids))
        began = time.monotonic()
        hold(stack, cluster.endpoints, members, job_size, a_channel, processes=4)
        took_s = time.monotonic() - began
        time.sleep(3)  # until the work for the last world is over
        from_, since = revision(cluster.etcd.endpoints), time.monotonic()
        cpu = watched(pids, seconds)
        writes = revision(cluster.etcd.endpoints) - from_
        minutes = (time.monotonic() - since) / 60
        grown_kib = sum(map(memory_kib, pids)) - empty_kib
    return {
        "members": members,
        "all_in_worlds_s": round(took_s, 1),
        "cpu_percent_of_replicas": [round(100 * share, 2) for share in cpu],
        "cpu_ms_a_second_a_member": round(1000 * sum(cpu) / members, 4),
        "kib_a_member": round(grown_kib / members, 1),
        "etcd_writes_a_minute": round(writes / minutes, 1),
    }


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--many", type=int, default=10_000)
    options = parser.parse_args()
    rest = measure(100, 100, 1, options.seconds)
    print(f"at rest: {rest}", flush=True)
    many = measure(options.many, min(1000, options.many), STREAMS, options.seconds)
    print(f"many: {many}", flush=True)
    summary = (
        f"100 members at rest: replicas use {max(rest['cpu_percent_of_replicas'])} % of a core at most,"
        f" {rest['etcd_writes_a_minute']} etcd writes a minute; {many['members']} members:"
        f" {many['kib_a_member']} KiB and {many['cpu_ms_a_second_a_member']} ms CPU a second each"
    )
    body = {
        "benchmark": "held",
        "goal": f"≤ {REST_CPU_PERCENT:g} % of a core, ≤ {REST_WRITES_A_MINUTE:g} writes a minute;"
        f" ≤ {MEMBER_KIB:g} KiB, ≤ {MEMBER_CPU_MS:g} ms CPU/s",
        "met": max(rest["cpu_percent_of_replicas"]) <= REST_CPU_PERCENT
        and rest["etcd_writes_a_minute"] <= REST_WRITES_A_MINUTE
        and many["kib_a_member"] <= MEMBER_KIB
        and many["cpu_ms_a_second_a_member"] <= MEMBER_CPU_MS,
        "summary": summary,
        "cores": os.cpu_count(),
        "rest": rest,
        "many": many,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
