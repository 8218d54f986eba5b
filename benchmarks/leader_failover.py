"""Time from the kill, freeze or stop of the leader until the next leader's first fenced write.

    python -m benchmarks.leader_failover [--json FILE] [--signal KILL|STOP|TERM] [--kills 20]

Three coordinators over etcd, and a job whose members are only keys. In each round the leader gets a signal, and a
member's key is deleted at the same moment, so that a new generation is due immediately. The time ends when etcd has
the world's head that the next leader wrote under its fence.

- killed: SIGKILL; a follower finds the leader's port refused and deposes the leader
- frozen: SIGSTOP; the followers notice the freeze when the leader's lease expires
- stopped: SIGTERM; the leader resigns

Meanwhile the members of another job meet at barriers and save checkpoints, from a separate process with sessions at
all three coordinators. No barrier and no save may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.core.ids import BootId, InstanceId, WorkerId
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import JobSpec, Replica, WorldHead, encode
from strata.core.kv.txn import Put, Txn
from strata.core.kv.view import Entry, View
from strata.core.members.membership import decide_leave, decide_register
from strata.core.members.registration import Registration
from strata.devcluster.local_cluster import LocalCluster, LocalCoordinator
from strata.etcd import EtcdStore
from strata.processes.children import Child

KEYS = ClusterKeys("default")
JOB = KEYS.job("failover")
GOAL_S = {"killed": 0.25, "frozen": 7.0, "stopped": 1.0}
SIGNALS = {"killed": "KILL", "frozen": "STOP", "stopped": "TERM"}
HARMS: dict[str, Callable[[Child], None]] = {
    "killed": Child.kill,
    "frozen": Child.pause,
    "stopped": Child.request_stop,
}
ROUNDS = {"killed": 100, "frozen": 6, "stopped": 6}
LIMIT_S = 60.0


class Observer:
    """Sees the keyspace as a replica does, and writes members' keys."""

    def __init__(self, mirror: Mirror, executor: Executor) -> None:
        self.mirror = mirror
        self.executor = executor
        self.instance = InstanceId(uuid.uuid4().hex)

    async def serve(self) -> None:
        """Register as the replica that serves the members, so that the members do not count as orphans."""
        record = encode(Replica(instance=self.instance, address="127.0.0.1:1"))
        put = Put(key=KEYS.replica("of-the-benchmark"), value=record)
        await self.executor.execute(Txn(success=(put,)))

    async def register(self, worker: str) -> None:
        """Add a member; the world grows immediately."""
        spec = JobSpec(max_workers=2, settle_s=0.0, max_no_progress_generations=1_000_000)
        registration = Registration(worker=WorkerId(worker), boot=BootId(uuid.uuid4().hex), spec=spec)
        await self.executor.settle(
            lambda view: decide_register(JobView(view, JOB), registration, served_by=self.instance)
        )

    async def leave(self, worker: str) -> None:
        """Remove a member."""
        held = JobView(self.mirror.view, JOB).worker(worker)
        assert held is not None
        await self.executor.settle(
            lambda view: decide_leave(JobView(view, JOB), WorkerId(worker), held.create_revision)
        )

    async def head(self, wanted: Callable[[Entry[WorldHead]], bool]) -> WorldHead:
        """Return the first head seen for which `wanted` returns True."""

        def there(view: View) -> bool:
            head = JobView(view, JOB).head()
            return head is not None and wanted(head)

        async with asyncio.timeout(LIMIT_S):
            await self.mirror.wait_until(there)
        head = JobView(self.mirror.view, JOB).head()
        assert head is not None
        return head.record


@asynccontextmanager
async def observing(cluster: LocalCluster) -> AsyncIterator[Observer]:
    """Open an observer that follows the cluster's etcd."""
    async with await EtcdStore.connect(cluster.etcd.endpoints) as store, asyncio.TaskGroup() as tasks:
        mirror = Mirror(store, KEYS, new_uid="never used")
        executor = Executor(store, mirror)
        running = [tasks.create_task(mirror.run()), tasks.create_task(executor.run())]
        await mirror.started()
        observer = Observer(mirror, executor)
        await observer.serve()
        yield observer
        for task in running:
            task.cancel()


async def round_(cluster: LocalCluster, observer: Observer, harm: Callable[[Child], None]) -> float:
    """Send the signal to the leader once; return the seconds until the next leader has written."""
    await observer.register("b")
    before = await observer.head(lambda head: head.record.members == 2)
    leader = await asyncio.to_thread(cluster.leader)
    began = time.monotonic()
    harm(leader.child)
    await observer.leave("b")
    await observer.head(lambda head: head.record.epoch > before.epoch)
    took_s = time.monotonic() - began
    await asyncio.to_thread(_mend, leader)
    return took_s


def _mend(leader: LocalCoordinator) -> None:
    leader.child.resume()
    leader.restart()
    leader.wait_ready(LIMIT_S)


class Meanwhile:
    """The barriers and saves of the other job; `report` ends them and returns their figures."""

    def __init__(self, endpoints: str, folder: Path) -> None:
        self._program = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._meanwhile", endpoints, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._program.stdout is not None
        if self._program.stdout.readline() != "ready\n":
            raise RuntimeError("the members did not start")

    def report(self) -> dict[str, Any]:
        output, _ = self._program.communicate(timeout=LIMIT_S)
        report: dict[str, Any] = json.loads(output)
        return report

    def kill(self) -> None:
        self._program.kill()
        self._program.wait()


async def measure(rounds: Mapping[str, int], members: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the sorted seconds for each signal, and the report of the barriers and saves."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cluster = await asyncio.to_thread(
            LocalCluster.start, Path(folder), etcd_members=members, coordinators=3
        )
        meanwhile = None
        try:
            meanwhile = await asyncio.to_thread(Meanwhile, cluster.endpoints, Path(folder) / "checkpoints")
            async with observing(cluster) as observer:
                await observer.register("a")
                for kind, count in rounds.items():
                    found[kind] = sorted([await round_(cluster, observer, HARMS[kind]) for _ in range(count)])
            report = await asyncio.to_thread(meanwhile.report)
        finally:
            if meanwhile is not None:
                meanwhile.kill()
            cluster.kill()
    return found, report


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """Return the figures of the table for sorted measurements."""
    return {
        "p50_s": round(seconds[math.ceil(0.5 * len(seconds)) - 1], 3),
        "p99_s": round(seconds[math.ceil(0.99 * len(seconds)) - 1], 3),
        "max_s": round(seconds[-1], 3),
        "rounds": len(seconds),
    }


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--signal", choices=sorted(SIGNALS.values()), help="only this signal")
    parser.add_argument("--kills", type=int, help="rounds for each signal")
    parser.add_argument("--etcd-members", type=int, default=3, choices=(1, 3))
    options = parser.parse_args()
    rounds = {
        kind: options.kills or count
        for kind, count in ROUNDS.items()
        if options.signal in {None, SIGNALS[kind]}
    }
    found, meanwhile = asyncio.run(measure(rounds, options.etcd_members))
    results = {kind: distribution(seconds) for kind, seconds in found.items()}
    met = all(r["p99_s"] <= GOAL_S[kind] for kind, r in results.items()) and not meanwhile["failures"]
    goal = ", ".join(f"{kind} p99 ≤ {GOAL_S[kind]:g} s" for kind in results)
    summary = "next leader's first write: " + ", ".join(
        f"{kind} {r['rounds']} times p50 {r['p50_s']:.2f} s, p99 {r['p99_s']:.2f} s"
        for kind, r in results.items()
    )
    summary += (
        f"; meanwhile {meanwhile['rounds']} barriers and {meanwhile['saves']} saves,"
        f" {len(meanwhile['failures'])} failed"
    )
    body = {
        "benchmark": "leader_failover",
        "goal": f"{goal}; no barrier or save fails",
        "met": met,
        "summary": summary,
        **results,
        "meanwhile": meanwhile,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
