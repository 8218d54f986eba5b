"""Links between real replicas: peers skip a frozen replica and use it again after it wakes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from strata.devcluster.etcd_cluster import EtcdCluster
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from tests.integration.replicas import LIMIT_S, Replicas, started


async def test_barriers_pass_over_a_frozen_replica_at_once(etcd: EtcdCluster, tmp_path: Path) -> None:
    async with started(etcd, "frozen-peer", tmp_path) as replicas:
        members = await replicas.world("r1", "r2")
        replicas["r3"].child.pause()
        slowest = 0.0
        for round_ in range(1, 41):
            began = time.monotonic()
            for rank, member in enumerate(members):
                member.arrive([rank], round_)
            results = [(await member.outcome(round_)).result for member in members]
            assert results == [BARRIER_RESULT_RELEASED] * 2
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 0.9, "no round waited until the frozen one counted as gone"
        await not_ready(replicas, "r3")
        replicas["r3"].child.resume()
        await replicas.ready()
        assert all(not member.over.is_set() for member in members)


async def not_ready(replicas: Replicas, name: str) -> None:
    """Return once the first replica no longer sees `name` as ready."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            status = await replicas["r1"].status()
            assert status is not None
            if not any(r.ready for r in status.replicas if r.replica.startswith(name)):
                return
            await asyncio.sleep(0.02)
