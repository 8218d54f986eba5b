"""The ends of ranks, told upward; who failed first is remembered for the exit status."""

from __future__ import annotations

import asyncio
from typing import Protocol

from strata.core.exit_codes import PREEMPTED
from strata.observe import get_logger

log = get_logger()


class Upstream(Protocol):
    """What reports need of the session with the coordinators."""

    async def rank_exit(
        self, *, generation: int, rank: int, code: int, reason: str, early: bool = False
    ) -> None:
        """Return once the end of a rank is durable, or its generation has ended."""
        ...


class ExitReports:
    """Tells of each end in a task of its own: nobody waits for a coordinator that is not there."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_generation = 0
        self.first_code = 0
        """How the rank ended that failed first, in the newest generation in which one did."""

    def report(self, generation: int, rank: int, code: int, reason: str, early: bool = False) -> None:
        """Tell that a rank ended: `code` is its exit code, or minus the signal; `early` as `RankExit` has it."""
        if code not in {0, PREEMPTED} and generation != self._failed_generation:
            # the first that fails is the cause; others fail because their collectives broke
            self._failed_generation, self.first_code = generation, code
        task = asyncio.create_task(
            self._upstream.rank_exit(generation=generation, rank=rank, code=code, reason=reason, early=early),
            name=f"report the end of rank {rank}",
        )
        self._tasks.add(task)
        task.add_done_callback(self._reported)

    async def told(self, limit_s: float | None = None) -> None:
        """Return once every end reported so far is durable, or can be told no more, or after the limit."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=limit_s)

    @property
    def all_told(self) -> bool:
        """Whether every end reported so far is durable, or can be told no more."""
        return not self._tasks

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # a newer world has ended the generation, or the session's own end is raised elsewhere
            log.info("rank.report_dropped", task=task.get_name(), reason=str(error))
