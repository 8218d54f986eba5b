"""Reports of rank exits to the coordinators; the first failure is remembered for the agent's exit status."""

from __future__ import annotations

import asyncio
from typing import Protocol

from strata.core.exit_codes import PREEMPTED
from strata.observe import get_logger

log = get_logger()


class Upstream(Protocol):
    """The method that reports need of the session with the coordinators."""

    async def rank_exit(
        self, *, generation: int, rank: int, code: int, reason: str, early: bool = False
    ) -> None:
        """Return once the exit of a rank is durable, or its generation has ended."""
        ...


class ExitReports:
    """Reports each exit in a task of its own, so that no caller waits for an unreachable coordinator."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_generation = 0
        self.first_code = 0
        """The exit code of the first rank that failed, in the newest generation in which a rank failed."""

    def report(self, generation: int, rank: int, code: int, reason: str, early: bool = False) -> None:
        """Report that a rank ended. `code`: its exit code, or minus the signal. `early`: as in `RankExit`."""
        if code not in {0, PREEMPTED} and generation != self._failed_generation:
            # the first failure is the cause; other ranks fail because their collectives broke
            self._failed_generation, self.first_code = generation, code
        task = asyncio.create_task(
            self._upstream.rank_exit(generation=generation, rank=rank, code=code, reason=reason, early=early),
            name=f"report the end of rank {rank}",
        )
        self._tasks.add(task)
        task.add_done_callback(self._reported)

    async def wait_delivered(self, limit_s: float | None = None) -> None:
        """Return once every exit reported so far is durable or can no longer be reported, or after the limit."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=limit_s)

    @property
    def all_delivered(self) -> bool:
        """Whether every exit reported so far is durable or can no longer be reported."""
        return not self._tasks

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # a newer world has ended the generation, or the session has ended: then another task raises the
            # session's error
            log.info("rank.report_dropped", task=task.get_name(), reason=str(error))
