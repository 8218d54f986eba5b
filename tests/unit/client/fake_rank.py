"""A rank's client, served by scripted coordinators."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, cast

from strata.client.event_loop import BackgroundLoop
from strata.client.rank.rank_client import RankClient
from strata.client.rank.shared_session import RankObserver, RankPlace, SharedSession
from strata.testing.virtual_time import run
from tests.unit.client.fake_replica import Rig, rig
from tests.unit.coordinator.rig import shown_as

P = ParamSpec("P")


class NoThread:
    """A stand-in for the background thread: the test itself runs in the event loop."""

    def at_stop(self, act: object) -> None:
        pass

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(coroutine)

    def soon(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)


@asynccontextmanager
async def rank_client(
    count: int = 1, generation: int = 1, *, owns_member: bool = True
) -> AsyncIterator[tuple[Rig, RankClient]]:
    async with rig(count) as r:
        place = RankPlace(job="j", worker_id="w", generation=generation, rank=0, world_size=2)
        background = cast("BackgroundLoop", NoThread())
        shared_session = SharedSession(
            session=r.session, watcher=RankObserver(), place=place, owns_member=owns_member
        )
        yield r, RankClient(shared_session, background)


def of_rank(
    count: int = 1,
) -> Callable[[Callable[Concatenate[Rig, RankClient, P], Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Make an `async def` test run in virtual time, with a rank's client that `count` replicas serve."""

    def decorate(
        test: Callable[Concatenate[Rig, RankClient, P], Coroutine[Any, Any, None]],
    ) -> Callable[P, None]:
        async def within(*given: P.args, **named: P.kwargs) -> None:
            async with rank_client(count) as (r, client):
                await test(r, client, *given, **named)

        return shown_as(test, lambda *given, **named: run(within(*given, **named)), given=2)

    return decorate
