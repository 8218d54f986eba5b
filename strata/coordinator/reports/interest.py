"""Interest in jobs and ranks: while a page or a terminal shows them, their members report more.

Costly information (when each member was last seen, where a rank's threads are, its output) travels
between replicas only while somebody views it. A view lasts `POLL_S`; a viewer renews the view to continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final

POLL_S: Final = 5.0
MAX_OBSERVED_RANKS: Final = 256
"""The most jobs and ranks that may be viewed at the same time; further ones are ignored."""


class Interest:
    """The jobs and ranks that somebody views, at this replica or at a peer."""

    def __init__(self) -> None:
        self._own: dict[tuple[str, int | None], float] = {}
        self._theirs: dict[tuple[str, int | None], float] = {}

    def look(self, job: str, rank: int | None = None) -> None:
        """Record that somebody views a job, or one of its ranks, at this replica."""
        self._note(self._own, job, rank)

    def record_peer(self, job: str, ranks: Iterable[int]) -> None:
        """Record that somebody views a job, and these ranks, at a peer."""
        self._note(self._theirs, job, None)
        for rank in ranks:
            self._note(self._theirs, job, rank)

    def own(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each job that is viewed at this replica, with its viewed ranks."""
        now_s = asyncio.get_running_loop().time()
        current = [key for key, until_s in self._own.items() if until_s > now_s]
        for job in dict.fromkeys(job for job, _rank in current):
            yield job, [rank for of, rank in current if of == job and rank is not None]

    def jobs(self) -> set[str]:
        """Return the jobs that somebody views."""
        return {job for job, _rank in self._current()}

    def ranks(self) -> set[tuple[str, int]]:
        """Return the ranks that somebody views."""
        return {(job, rank) for job, rank in self._current() if rank is not None}

    def _current(self) -> set[tuple[str, int | None]]:
        now_s = asyncio.get_running_loop().time()
        for held in (self._own, self._theirs):
            for key in [key for key, until_s in held.items() if until_s <= now_s]:
                del held[key]
        return {*self._own, *self._theirs}

    @staticmethod
    def _note(held: dict[tuple[str, int | None], float], job: str, rank: int | None) -> None:
        if len(held) < MAX_OBSERVED_RANKS or (job, rank) in held:
            held[job, rank] = asyncio.get_running_loop().time() + POLL_S
