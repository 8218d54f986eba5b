"""The join barrier, if the session refuses an arrival immediately, as the real session does."""

from __future__ import annotations

import asyncio

from strata.agent.joining import join_barrier
from strata.errors import StaleGeneration
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import World, WorldMember


class Ahead:
    """A session that knows a newer world than its agent has received."""

    def arrive(self, arrival: Arrival) -> asyncio.Future[BarrierOutcome]:
        raise StaleGeneration(f"barrier {arrival.name} is of generation {arrival.generation}")


async def test_a_world_that_ended_before_its_barrier_is_not_joined() -> None:
    """After a freeze, a host receives two worlds at the same time."""

    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    update = WorldUpdate(
        world=World(generation=2, size=2, members=1), place=WorldMember(worker_id="w", slots=2, first_rank=0)
    )
    met = await join_barrier(Ahead(), update, job="j", payload=b"", timeout_s=60.0, superseded=never())
    assert met is None
