"""What ranks last said of themselves: soft, for people, and to name what the missing were doing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from strata.core.arrivals import MAX_PHASE_CHARS, MAX_TIME_MS
from strata.v1 import members_pb2, peers_pb2


@dataclass(slots=True)
class _Said:
    step: int
    phase: str
    at: float
    """On this loop's clock, as far as the age on the way tells."""


@dataclass(slots=True)
class _Generation:
    number: int
    said: dict[int, _Said] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    """The ranks that said so here, and not by way of a peer."""
    news: set[int] = field(default_factory=set)
    """Those of them that peers have not been told of."""


class ProgressBoard:
    """The last word of every rank of every job's newest generation."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Generation] = {}

    def note(
        self, job: str, generation: int, ranks: Iterable[members_pb2.RankProgress], *, own: bool
    ) -> None:
        """Take note of what ranks said; `own`: they are served here, so peers shall hear of it."""
        held = self._jobs.get(job)
        if held is None or held.number < generation:
            held = self._jobs[job] = _Generation(generation)
        elif held.number > generation:
            return
        now = asyncio.get_running_loop().time()
        for rank in ranks:
            age_ms = min(max(0, rank.age_ms), MAX_TIME_MS)
            said = _Said(rank.step, rank.phase[:MAX_PHASE_CHARS], now - age_ms / 1000)
            before = held.said.get(rank.rank)
            if before is not None and before.at > said.at:
                continue
            held.said[rank.rank] = said
            if own:
                held.own.add(rank.rank)
                held.news.add(rank.rank)

    def forget(self, job: str) -> None:
        """Drop what was said in a job that has ended."""
        self._jobs.pop(job, None)

    def phases(self, job: str, generation: int) -> dict[int, str]:
        """Return, by rank, what each was doing when it was last heard."""
        held = self._jobs.get(job)
        if held is None or held.number != generation:
            return {}
        return {rank: f"{said.phase}, step {said.step}" for rank, said in held.said.items() if said.phase}

    def ranks(self, job: str, generation: int, ranks: Iterable[int]) -> list[members_pb2.RankProgress]:
        """Return what is known of these ranks; those that said nothing are absent."""
        held = self._jobs.get(job)
        if held is None or held.number != generation:
            return []
        return [_message(rank, held.said[rank]) for rank in ranks if rank in held.said]

    def news(self) -> list[peers_pb2.PeerProgress]:
        """Return what peers have not been told of, and count it as told."""
        told = []
        for job, held in self._jobs.items():
            if held.news:
                ranks = [_message(rank, held.said[rank]) for rank in sorted(held.news)]
                told.append(peers_pb2.PeerProgress(job=job, generation=held.number, ranks=ranks))
                held.news.clear()
        return told

    def tell_again(self) -> None:
        """Count everything of our own as untold: there is a new peer."""
        for held in self._jobs.values():
            held.news |= held.own


def _message(rank: int, said: _Said) -> members_pb2.RankProgress:
    age_s = asyncio.get_running_loop().time() - said.at
    return members_pb2.RankProgress(
        rank=rank, step=said.step, phase=said.phase, age_ms=max(0, int(age_s * 1000))
    )
