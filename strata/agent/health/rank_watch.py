"""The agent's watch over its ranks' progress: detects stalled ranks, collects stacks and traces, may evict ranks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from strata.agent.environment import Place
from strata.agent.health.traces import collect_trace
from strata.client.rank.stall_watch import Actions, StallWatch, kept
from strata.config import HealthConfig
from strata.config.health import EVICT
from strata.core.health.stalls import StallLimits, kind_of
from strata.errors import StrataError
from strata.observe import get_logger
from strata.v1.members_pb2 import RankProgress
from strata.v1.worlds_pb2 import GetJobRequest, GetJobResponse

log = get_logger()

BLAME_S: Final = 5.0
"""How long coordinators have to answer which ranks cause a stall."""


class Upstream(Protocol):
    """The part of the session with the coordinators that the watch needs."""

    def progress(self, generation: int, ranks: Sequence[RankProgress]) -> None:
        """Report the progress of ranks."""
        ...

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        """Return the response to `request`, which must be of a kind that a session carries."""
        ...


class Ranks(Protocol):
    """The methods that the watch needs of the agent."""

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """Kill a rank of this generation; its exit report carries the reason."""
        ...

    async def stack(self, rank: int) -> str | None:
        """Return the stacks of a rank's threads; None if the rank does not run here or does not answer."""
        ...

    def process(self, rank: int) -> str:
        """Return the state of a rank's process; "" if the process is not here or its state is unreadable."""
        ...


class Health:
    """The watch over the progress of one agent's ranks."""

    def __init__(self, config: HealthConfig, upstream: Upstream, ranks: Ranks, *, detect_s: float) -> None:
        self._upstream = upstream
        fixed_s = {kind_of(phase): seconds for phase, seconds in config.phase_limits_s().items()}
        limits = StallLimits.derive(detect_s, factor=config.stall_factor, fixed_s=fixed_s)
        self.stalls = StallWatch(
            limits,
            Actions(
                log=log,
                tell=upstream.progress,
                stack=ranks.stack,
                process=ranks.process,
                trace=self._trace,
                evict=ranks.evict if config.on_stall == EVICT else None,
                blame=self._blame,
            ),
        )

    def set_place(self, place: Place | None) -> None:
        """Watch the ranks of `place` from now on; None watches no rank."""
        self.stalls.watch(place.generation if place is not None else 0)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch inside the block."""
        watch = asyncio.create_task(kept(self.stalls.run, log), name="watch over stalls")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _blame(self) -> Collection[int] | None:
        """Return the ranks that the coordinators blame for a stall; None if no coordinator answers."""
        try:
            response: GetJobResponse = await self._upstream.call(GetJobRequest(), timeout_s=BLAME_S)
        except StrataError as error:
            log.warning("stalls.not_evicted", reason=error.message)
            return None
        return frozenset(response.job.suspects)

    async def _trace(self, rank: int) -> tuple[Path, int] | None:
        return await collect_trace(os.environ, rank)
