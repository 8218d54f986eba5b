"""What an agent answers while somebody looks at one of its ranks: its threads' stacks, and what it wrote last."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

from strata.core.stacks import shortened
from strata.v1.members_pb2 import RankEvidence
from strata.v1.session_pb2 import Down

STACK_CHARS: Final = 4000
TAIL_BYTES: Final = 8192
TAIL_LINES: Final = 40


class Session(Protocol):
    """What this needs of the session with the coordinators."""

    def evidence(self, generation: int, evidence: RankEvidence) -> None:
        """Tell what is seen of a rank."""
        ...


class Inspection:
    """Answers the looks that come on a session; one look at a rank at a time."""

    def __init__(
        self,
        session: Session,
        stack: Callable[[int], Awaitable[str | None]],
        log_file: Callable[[int], Path | None],
    ) -> None:
        """`stack` returns where a rank's threads stand, `log_file` what its output goes to; None: not known."""
        self._session = session
        self._stack = stack
        self._log_file = log_file
        self._looking: dict[int, asyncio.Task[None]] = {}

    def on_request(self, down: Down) -> None:
        """Take a message of the session; those that are no look are passed over."""
        if down.HasField("inspect") and down.inspect.rank not in self._looking:
            rank = down.inspect.rank
            task = asyncio.create_task(self._look(down.inspect.generation, rank), name=f"look at rank {rank}")
            self._looking[rank] = task
            task.add_done_callback(lambda _done: self._looking.pop(rank, None))

    async def _look(self, generation: int, rank: int) -> None:
        stack, file = await self._stack(rank), self._log_file(rank)
        lines = await asyncio.to_thread(last_lines, file) if file is not None else []
        self._session.evidence(
            generation,
            RankEvidence(
                rank=rank,
                stack=shortened(stack or "", STACK_CHARS),
                log=lines,
                log_file=str(file) if file is not None else "",
            ),
        )


def last_lines(file: Path) -> list[str]:
    """Return the last lines of a file, of bounded length; none if it cannot be read."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - TAIL_BYTES))
            text = opened.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = text.splitlines()
    if size > TAIL_BYTES:
        lines = lines[1:]  # its beginning is not there
    return lines[-TAIL_LINES:]
