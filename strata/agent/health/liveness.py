"""Liveness of this agent's rank processes: detects processes that are frozen or dump core.

The agent reads /proc/<pid>/status, which for eight ranks takes 0.2 % of a core. The ranks need not do anything, so a
rank that holds the GIL is judged like any other (`core.members.rank_liveness` has the rules). A process that has ended
is neither watched nor reported any longer: `strata run` and torchrun wait for the processes that they started.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from strata.client.rank.stall_watch import kept
from strata.core.members.rank_liveness import Sampling, StopCount, Verdict
from strata.observe import get_logger

log = get_logger()

_SWITCHES: Final = re.compile(rb"ctxt_switches:\t(\d+)")
_MAX_BYTES: Final = 1 << 16
"""More than a status file's size: a process may be in thousands of groups, which are listed before `CoreDumping`."""


class Process(Protocol):
    """A rank's process, identified by a pidfd: a later process with the same pid is not mistaken for it."""

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...


OfRank = Callable[[int, int, str], None]
"""Called with (rank, generation, reason)."""


@dataclass(frozen=True, slots=True)
class _Watched:
    status: int
    """Descriptor of /proc/<pid>/status, which never shows another process, even if the pid is reused."""
    count: StopCount


class Liveness:
    """Calls `on_frozen` or `on_core_dump` once for a watched process, and then stops watching it."""

    def __init__(self, *, detect_s: float, on_frozen: OfRank, on_core_dump: OfRank) -> None:
        self._sampling = Sampling.derive(detect_s)
        self._on_frozen = on_frozen
        self._on_core_dump = on_core_dump
        self._watched: dict[tuple[int, int], _Watched] = {}
        """By generation and rank."""

    def watch(self, rank: int, generation: int, process: Process) -> None:
        """Watch `process` as the process of this rank, instead of any earlier one."""
        self._drop(generation, rank)
        try:
            status = os.open(f"/proc/{process.pid}/status", os.O_RDONLY)
        except OSError as error:  # the process has ended, /proc hides it, or no descriptor is left
            if process.alive:
                log.warning("rank.not_watched", rank=rank, pid=process.pid, reason=error.strerror)
            return
        if process.alive:  # alive after the open, so the opened file is this process's
            self._watched[generation, rank] = _Watched(status, StopCount(self._sampling))
        else:
            os.close(status)

    def forget(self, generation: int | None = None) -> None:
        """Stop watching the ranks of this generation; None: all ranks."""
        for its_generation, rank in list(self._watched):
            if generation in {None, its_generation}:
                self._drop(its_generation, rank)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch inside the block, and forget all ranks after it."""
        watch = asyncio.create_task(kept(self.run, log), name="watch over liveness")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self.forget()

    async def run(self) -> None:
        """Sample all watched processes until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = self._sample_all(loop.time())
            await asyncio.sleep(due_s - loop.time())

    def _sample_all(self, now_s: float) -> float:
        """Sample each process once, then report; return when the next samples are due."""
        due_s = now_s + self._sampling.interval_s
        found: list[tuple[OfRank, int, int, str]] = []
        for (generation, rank), watched in list(self._watched.items()):
            try:
                status = os.pread(watched.status, _MAX_BYTES, 0)
            except ProcessLookupError:
                self._drop(generation, rank)
                continue
            except OSError:
                status = b""
            verdict = watched.count.sample(
                now_s,
                _state(status),
                switches=sum(map(int, _SWITCHES.findall(status))),
                dumps_core=b"\nCoreDumping:\t1" in status,
            )
            match verdict:
                case Verdict.ALIVE:
                    due_s = min(due_s, watched.count.due_s(now_s))
                    continue
                case Verdict.FROZEN:
                    found.append((self._on_frozen, rank, generation, self._sampling.frozen))
                case Verdict.DUMPS_CORE:
                    found.append((self._on_core_dump, rank, generation, self._sampling.dumps_core))
            self._drop(generation, rank)
        for report, rank, generation, reason in found:  # after the loop: a report may change `_watched`
            report(rank, generation, reason)
        return due_s

    def _drop(self, generation: int, rank: int) -> None:
        if (watched := self._watched.pop((generation, rank), None)) is not None:
            os.close(watched.status)


def _state(status: bytes) -> str:
    """Return the kernel's state letter of a process. A program's name cannot fake this line: the kernel escapes
    line breaks.
    """
    return status.partition(b"\nState:\t")[2][:1].decode()
