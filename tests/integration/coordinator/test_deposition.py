"""After each kill of a leader another replica leads immediately, and members are not affected (PROTOCOLS 4.7)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from strata.devcluster.etcd_cluster import EtcdCluster
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from tests.integration.replicas import LIMIT_S, Replicas, started

KILLS = 6
LEASE_LEFT_S = 4.5
"""A lease of 6 s that is renewed every second expires at least this long after its holder's death."""


async def epoch(replicas: Replicas, *, without: str = "") -> int:
    """Return the leader epoch from the first replica that answers; 0 if it knows no leader."""
    for name in replicas.names:
        if name != without and (status := await replicas[name].status()) is not None:
            return status.leader_epoch if status.leader else 0
    return 0


async def test_killed_leaders_are_followed_long_before_their_lease_ends(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with started(etcd, "deposition", tmp_path, spares=True) as replicas:
        took = []
        for number in range(1, KILLS + 1):
            leader = await replicas.leader()
            others = [name for name in replicas.names if name != leader]
            replicas.job = f"job-{number}"
            members = await replicas.world(*others)
            before = await epoch(replicas)
            began = time.monotonic()
            replicas[leader].kill()
            for rank, member in enumerate(members):
                member.arrive([rank])
            async with asyncio.timeout(LIMIT_S):
                while await epoch(replicas, without=leader) <= before:  # noqa: ASYNC110  # polls another process
                    await asyncio.sleep(0.005)
            took.append(time.monotonic() - began)
            for member in members:
                assert (await member.outcome()).result == BARRIER_RESULT_RELEASED
                assert not member.over.is_set()
            replicas[leader].start()
            await replicas.ready()
        assert max(took) < LEASE_LEFT_S
        assert sorted(took)[KILLS // 2] < 1.0
