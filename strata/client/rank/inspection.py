"""An agent's answer to an inspection of one of its ranks: its threads' stacks, and its last output lines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from strata.client.rank.stall_watch import Log
from strata.core.health.stacks import shortened
from strata.v1.members_pb2 import RankEvidence
from strata.v1.members_pb2 import RankLog as RankLogMessage
from strata.v1.session_pb2 import Down

STACK_CHARS: Final = 4000
TAIL_BYTES: Final = 8192
TAIL_LINES: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """The output file of one process of a rank, running or ended."""

    generation: int
    """The generation in which the process began."""
    file: Path
    ended: str = ""
    """How the process ended; "" while it runs."""


class Inspection:
    """Answers the inspection requests that arrive on a session; for each rank, one request at a time."""

    def __init__(
        self,
        tell: Callable[[int, RankEvidence], None],
        stack: Callable[[int], Awaitable[str | None]],
        logs: Callable[[int], Sequence[RankLog]],
        *,
        log: Log,
    ) -> None:
        """`tell` is called with (generation, evidence). `stack` returns the stacks of a rank's threads, or None
        if they are unknown. `logs` returns a rank's output files, the newest process first.
        """
        self._send = tell
        self._stack = stack
        self._logs = logs
        self._log = log
        self._running: dict[int, asyncio.Task[None]] = {}

    def on_request(self, down: Down) -> None:
        """Handle a message of the session; ignore messages that request no inspection."""
        if down.HasField("inspect") and down.inspect.rank not in self._running:
            rank = down.inspect.rank
            task = asyncio.create_task(
                self._inspect(down.inspect.generation, rank), name=f"inspect rank {rank}"
            )
            self._running[rank] = task
            task.add_done_callback(partial(self._log_failure, rank))

    def _log_failure(self, rank: int, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # the request is repeated every second, and a failed inspection must not end the training
            self._log.warning("rank.not_inspected", rank=rank, reason=f"{type(error).__name__}: {error}")

    async def _inspect(self, generation: int, rank: int) -> None:
        try:
            self._send(generation, await self._collect(rank))
        finally:
            del self._running[rank]

    async def _collect(self, rank: int) -> RankEvidence:
        stack, logs = await self._stack(rank), self._logs(rank)
        newest, before = await asyncio.to_thread(_newest_two, logs)
        return RankEvidence(
            rank=rank,
            stack=shortened(stack or "", STACK_CHARS),
            log=newest.lines,
            log_file=newest.file,
            log_generation=newest.generation,
            log_ended=newest.ended,
            before=before,
        )


def _newest_two(logs: Sequence[RankLog]) -> tuple[RankLogMessage, RankLogMessage | None]:
    read = [
        RankLogMessage(
            generation=each.generation, file=str(each.file), ended=each.ended, lines=last_lines(each.file)
        )
        for each in logs[:2]
    ]
    return read[0] if read else RankLogMessage(), read[1] if len(read) > 1 else None


def last_lines(file: Path) -> list[str]:
    """Return the last lines of a file, of bounded length; if it cannot be read, one line with the reason."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - TAIL_BYTES))
            text = opened.read(TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return [f"({file} cannot be read: {error.strerror or error})"]
    lines = text.splitlines()
    if size > TAIL_BYTES:
        lines = lines[1:]  # the beginning of the first line is cut off
    return lines[-TAIL_LINES:]
