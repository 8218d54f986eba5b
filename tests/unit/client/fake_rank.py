"""A rank served by a coordinator by script."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

from strata.client.loop import BackgroundLoop
from strata.client.rank import RankClient
from strata.client.seat import RankPlace, Seat, Watcher
from tests.unit.client.fake_replica import Rig, rig


class NoThread:
    """In the place of the background thread: the test is in the loop itself."""

    def at_stop(self, act: object) -> None:
        pass

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(coroutine)

    def soon(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)


@asynccontextmanager
async def rank_client(count: int = 1, generation: int = 1) -> AsyncIterator[tuple[Rig, RankClient]]:
    async with rig(count) as r:
        place = RankPlace(job="j", worker_id="w", generation=generation, rank=0, world_size=2)
        background = cast("BackgroundLoop", NoThread())
        seat = Seat(session=r.session, watcher=Watcher(), place=place, owns_member=True)
        yield r, RankClient(seat, background)
