"""How soon a rank detects that its agent has ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from strata.client.rank.shared_session import RankObserver
from strata.client.rank_session import RankSession
from strata.errors import StaleIncarnation, Unavailable
from strata.session.endpoints import Endpoint
from strata.session.link import Link
from strata.testing.links import pair
from strata.testing.virtual_time import run
from strata.v1.session_pb2 import Down, RankHello, Up

FROZEN_S = 13.0


async def _outlived_s(seed: int) -> float:
    """Return for how many seconds a rank outlives an agent that freezes and is then killed."""
    rng = random.Random(seed)
    killed = asyncio.Event()

    @asynccontextmanager
    async def dial(_endpoint: Endpoint) -> AsyncIterator[Link[Down, Up]]:
        if killed.is_set():
            raise StaleIncarnation("the agent has ended")
        await killed.wait()  # the kernel accepted the connection, but nothing answers until it is reset
        if killed.is_set():
            raise Unavailable("the connection was reset")
        yield pair()[0]

    session = RankSession(Endpoint(path="/agent"), RankHello(), RankObserver(), rng=rng, dial=dial)
    running = asyncio.create_task(session.run())
    await asyncio.sleep(FROZEN_S + rng.uniform(0, 2))
    killed.set()
    killed_s = asyncio.get_running_loop().time()
    with pytest.raises(StaleIncarnation):
        await running
    return asyncio.get_running_loop().time() - killed_s


def test_a_rank_ends_within_a_second_of_an_agent_that_was_frozen_before() -> None:
    assert max(run(_outlived_s(seed), seed=seed) for seed in range(50)) < 1
