"""A barrier whose arrivals come through three real replicas survives the SIGKILL of any of them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from strata.devcluster.etcd_cluster import EtcdCluster
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED
from tests.integration.replicas import started
from tests.raw_member import Member

KILLS = 50


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_barrier_survives_the_kill_of_any_replica_fifty_times(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    chance = random.Random(7)
    async with started(etcd, "barriers-kills", tmp_path, spares=True) as replicas:
        members = await replicas.world(*replicas.names)
        at = dict(zip(range(3), replicas.names, strict=True))
        for rank, member in enumerate(members):  # the order of ranks is not the order of registration
            await member.connect(at[rank])
        for kill in range(KILLS):
            victim = replicas.names[kill % 3]
            lost = members[next(rank for rank, name in at.items() if name == victim)]
            killed_at = chance.choice([0, 1, 2, 3, 3, 3])
            outcome = asyncio.create_task(_outcomes(members, kill + 1))
            for step in range(4):
                if step == killed_at:
                    await asyncio.sleep(chance.uniform(0, 0.004))
                    replicas[victim].kill()
                    replicas[victim].start()
                if step < 3:
                    _arrive(members[step], step, kill + 1)
            await lost.over.wait()
            await lost.connect(chance.choice([name for name in replicas.names if name != victim]))
            _arrive(lost, members.index(lost), kill + 1)
            results = await outcome
            assert results == [BARRIER_RESULT_RELEASED] * 3, f"kill {kill + 1} of {victim}"
            await replicas.ready()
            await lost.connect(victim)
        for member in members:
            assert (await member.world()).world.generation == 1, "nobody was declared dead"


def _arrive(member: Member, rank: int, round_: int) -> None:
    if member.link is not None:
        member.arrive([rank], round_, age_ms=1)


async def _outcomes(members: list[Member], round_: int) -> list[int]:
    """Return the results that the members receive over their present connections."""
    return [(await member.outcome(round_)).result for member in members]
