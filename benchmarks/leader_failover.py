"""How soon the next leader acts: its first fenced write, after the old one was killed, frozen or stopped.

    python -m benchmarks.leader_failover [--json FILE] [--rounds 6] [--etcd-members 3]

Three coordinators over etcd, and a job whose members are only keys. In each round the leader is
harmed and a member's key goes at the same moment, so that a new generation is due at once; the
time is taken until its head, written by the next leader under its fence, is seen in etcd.

- killed: SIGKILL; the others learn of it when its lease ends
- frozen: SIGSTOP; likewise
- stopped: SIGTERM; it resigns
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from strata.coordinator.view.mirror import Mirror
from strata.coordinator.writes.executor import Executor
from strata.core.ids import BootId, InstanceId, WorkerId
from strata.core.job import JobView
from strata.core.keys import ClusterKeys
from strata.core.members import Registration, decide_leave, decide_register
from strata.core.records import JobSpec, Replica, WorldHead, encode
from strata.core.txn import Put, Txn
from strata.core.view import Entry, View
from strata.etcd import EtcdStore
from strata.launch.children import Child
from strata.launch.local_cluster import LocalCluster, LocalCoordinator

KEYS = ClusterKeys("default")
JOB = KEYS.job("failover")
GOAL_S = {"killed": 7.0, "frozen": 7.0, "stopped": 1.0}
LIMIT_S = 60.0


class Observer:
    """Sees the keyspace as a replica does, and writes members' keys."""

    def __init__(self, mirror: Mirror, executor: Executor) -> None:
        self.mirror = mirror
        self.executor = executor
        self.instance = InstanceId(uuid.uuid4().hex)

    async def serve(self) -> None:
        """Be the replica that serves the members, so that they are no orphans."""
        record = encode(Replica(instance=self.instance, address="127.0.0.1:1"))
        put = Put(key=KEYS.replica("of-the-benchmark"), value=record)
        await self.executor.execute(Txn(success=(put,)))

    async def register(self, worker: str) -> None:
        """Add a member; the world grows at once."""
        spec = JobSpec(max_workers=2, settle_s=0.0, max_fruitless_generations=1_000_000)
        registration = Registration(worker=WorkerId(worker), boot=BootId(uuid.uuid4().hex), spec=spec)
        await self.executor.settle(
            lambda view: decide_register(JobView(view, JOB), registration, served_by=self.instance)
        )

    async def leave(self, worker: str) -> None:
        """Take a member away."""
        held = JobView(self.mirror.view, JOB).worker(worker)
        assert held is not None
        await self.executor.settle(
            lambda view: decide_leave(JobView(view, JOB), WorkerId(worker), held.create_revision)
        )

    async def head(self, wanted: Callable[[Entry[WorldHead]], bool]) -> WorldHead:
        """Return the first head seen that is `wanted`."""

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
    """Yield an observer that follows the cluster's etcd."""
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
    """Harm the leader once; return the seconds until the next one has written."""
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


async def measure(rounds: int, members: int) -> dict[str, list[float]]:
    """Return the sorted seconds of each kind of harm."""
    kinds: dict[str, Callable[[Child], None]] = {
        "killed": Child.kill,
        "frozen": Child.pause,
        "stopped": Child.ask_to_stop,
    }
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cluster = await asyncio.to_thread(
            LocalCluster.start, Path(folder), etcd_members=members, coordinators=3
        )
        try:
            async with observing(cluster) as observer:
                await observer.register("a")
                for kind, harm in kinds.items():
                    found[kind] = sorted([await round_(cluster, observer, harm) for _ in range(rounds)])
        finally:
            cluster.kill()
    return found


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """Return what the table shows of sorted measurements."""
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
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--etcd-members", type=int, default=3, choices=(1, 3))
    options = parser.parse_args()
    results = {
        kind: distribution(seconds)
        for kind, seconds in asyncio.run(measure(options.rounds, options.etcd_members)).items()
    }
    met = all(results[kind]["p99_s"] <= goal_s for kind, goal_s in GOAL_S.items())
    goal = ", ".join(f"{kind} p99 ≤ {goal_s:g} s" for kind, goal_s in GOAL_S.items())
    summary = "next leader's first write: " + ", ".join(
        f"{kind} p50 {r['p50_s']:.2f} s, p99 {r['p99_s']:.2f} s" for kind, r in results.items()
    )
    body = {"benchmark": "leader_failover", "goal": goal, "met": met, "summary": summary, **results}
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
