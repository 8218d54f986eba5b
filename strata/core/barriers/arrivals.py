"""Arrivals at the rounds of barriers: soft state of one replica, merged by rank.

A replica adds the arrivals of its own members and those that its peers forward. Neither the order of arrivals nor a
repeated arrival changes the result. Nothing here is durable: a replica that knows all arrivals writes the round's
outcome (`core.barriers.outcomes`), and ranks send their open arrivals again after every reconnect.

Times are milliseconds of one clock of the caller; messages carry ages instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from strata.core.ids import checked_id
from strata.core.words import ranks_text
from strata.errors import InvalidArgument, QuotaExceeded

MAX_PAYLOAD_BYTES = 4 * 1024
MAX_ROUND_BYTES = 512 * 1024
"""The limit for all payloads of a round; each rank may send an equal share of this (PROTOCOLS 6.6)."""
MAX_OPEN_ROUNDS = 256
"""The limit of open rounds per job in one replica."""
MAX_TIME_MS = 10**12
"""The limit of an age or a timeout: 31 years. The sum of two such times still fits into a message's field."""
MAX_PHASE_CHARS = 64
"""The limit for the text of a rank's phase, its reported activity; longer texts are cut off."""


class BarrierKey(NamedTuple):
    """One round of one barrier in one generation."""

    job: str
    name: str
    generation: int
    round: int

    def __str__(self) -> str:
        return f"barrier {self.name}/{self.generation}/{self.round} of job {self.job}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Ranks of one process arrive at a round.

    `payloads` and `phases` are empty or have one entry per rank. `participants` empty means all ranks.
    `age_ms`: how long ago the first of these ranks arrived. `timeout_ms`: how long after the first arrival the
    round times out (0: never).
    """

    job: str
    name: str
    generation: int
    round: int
    ranks: tuple[int, ...]
    payloads: tuple[bytes, ...] = ()
    participants: tuple[int, ...] = ()
    age_ms: int = 0
    timeout_ms: int = 0
    phases: tuple[str, ...] = ()

    @property
    def key(self) -> BarrierKey:
        return BarrierKey(self.job, self.name, self.generation, self.round)


@lru_cache(maxsize=64)
def participants_digest(ranks: tuple[int, ...] | range) -> str:
    """Return the sha256, in hex, of the ASCII text of the ranks as runs: `0-3,7`."""
    return hashlib.sha256(ranks_text(ranks, between=",").encode("ascii")).hexdigest()


def payload_limit(participants: int) -> int:
    """Return the maximum payload, in bytes, of each of this many participants."""
    return min(MAX_PAYLOAD_BYTES, MAX_ROUND_BYTES // max(1, participants))


class OpenRound:
    """One replica's knowledge of a round without an outcome. Only `BarrierBook` changes it."""

    __slots__ = (
        "arrived",
        "deadline_ms",
        "digest",
        "key",
        "participants",
        "phases",
        "since_ms",
        "stated",
    )

    def __init__(self, key: BarrierKey, stated: tuple[int, ...], size: int) -> None:
        self.key = key
        self.stated = stated
        self.participants: Collection[int] = _participants(stated, size)
        self.digest = participants_digest(stated or range(size))
        self.arrived: dict[int, bytes] = {}
        self.phases: dict[int, str] = {}
        self.since_ms = float("inf")
        self.deadline_ms: float | None = None

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.participants)

    def missing(self) -> list[int]:
        """Return the participants that have not arrived, in order."""
        return [] if self.complete else sorted(set(self.participants) - self.arrived.keys())

    def arrival(self, now_ms: float, ranks: Collection[int] | None = None) -> Arrival:
        """Return everything known here (of `ranks`, if given) as one arrival, for forwarding."""
        known = sorted(self.arrived if ranks is None else self.arrived.keys() & set(ranks))
        has_payload = any(self.arrived[rank] for rank in known)
        deadline_ms = self.deadline_ms
        return Arrival(
            job=self.key.job,
            name=self.key.name,
            generation=self.key.generation,
            round=self.key.round,
            ranks=tuple(known),
            payloads=tuple(self.arrived[rank] for rank in known) if has_payload else (),
            participants=self.stated,
            age_ms=max(0, int(now_ms - self.since_ms)),
            timeout_ms=0 if deadline_ms is None else max(1, int(deadline_ms - self.since_ms)),
            phases=tuple(self.phases.get(rank, "") for rank in known) if self.phases else (),
        )


class BarrierBook:
    """All open rounds that one replica knows."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[BarrierKey, OpenRound]] = {}

    def add(self, arrival: Arrival, *, size: int, now_ms: float) -> OpenRound:
        """Merge an arrival into its round and return the round; a rank that arrived before changes nothing.

        `size`: the number of ranks of the generation. An arrival with an error changes nothing: `InvalidArgument`
        if the arrival is malformed or names other participants than earlier arrivals, `QuotaExceeded` if a payload
        or the number of open rounds is above its limit.
        """
        rounds = self._jobs.get(arrival.job, {})
        entry = rounds.get(arrival.key)
        if entry is None:
            _check_shape(arrival)
            if len(rounds) >= MAX_OPEN_ROUNDS:
                raise QuotaExceeded(
                    f"job {arrival.job} has {len(rounds)} barriers open at once",
                    hint="wait for some of them before you open more",
                )
            entry = OpenRound(arrival.key, arrival.participants, size)
        elif arrival.participants != entry.stated:
            _check_same_participants(entry, arrival, size)
        _check_ranks(entry, arrival)
        rounds[entry.key] = entry
        self._jobs[arrival.job] = rounds
        _merge(entry, arrival, now_ms)
        return entry

    def get(self, key: BarrierKey) -> OpenRound | None:
        return self._jobs.get(key.job, {}).get(key)

    def open(self, job: str | None = None) -> Iterator[OpenRound]:
        """Yield the open rounds of one job or of all jobs; the book may change during the iteration."""
        for name in list(self._jobs) if job is None else [job]:
            yield from list(self._jobs.get(name, {}).values())

    def drop(self, key: BarrierKey) -> None:
        """Remove a round that has ended."""
        rounds = self._jobs.get(key.job, {})
        rounds.pop(key, None)
        if not rounds:
            self._jobs.pop(key.job, None)

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))


def _participants(stated: tuple[int, ...], size: int) -> Collection[int]:
    if not stated:
        return range(size)
    ranks = frozenset(stated)
    if len(ranks) != len(stated) or min(ranks) < 0 or max(ranks) >= size:
        raise InvalidArgument(f"participants {ranks_text(ranks)} are not distinct ranks of 0 .. {size - 1}")
    return ranks


def _check_shape(arrival: Arrival) -> None:
    checked_id("barrier", arrival.name)
    if arrival.round < 1 or arrival.generation < 1:
        raise InvalidArgument(f"{arrival.key}: rounds and generations begin at 1")


def _check_same_participants(entry: OpenRound, arrival: Arrival, size: int) -> None:
    """Raise `InvalidArgument` with the difference unless the round and the arrival name the same ranks."""
    theirs = _participants(arrival.participants, size)
    if len(theirs) == len(entry.participants) and set(theirs) == set(entry.participants):
        return
    here = ranks_text(set(theirs) - set(entry.participants)) or "none"
    there = ranks_text(set(entry.participants) - set(theirs)) or "none"
    raise InvalidArgument(
        f"{entry.key}: ranks {ranks_text(arrival.ranks)} name other participants than those"
        f" before them: only these name {here}; only those name {there}",
        hint="all participants of a barrier must state the same ranks",
    )


def _check_ranks(entry: OpenRound, arrival: Arrival) -> None:
    ranks, payloads = arrival.ranks, arrival.payloads
    if not ranks or (len(ranks) > 1 and len(set(ranks)) != len(ranks)):
        raise InvalidArgument(f"{entry.key}: an arrival names one rank or more, each once")
    for rank in ranks:
        if rank not in entry.participants:
            raise InvalidArgument(
                f"{entry.key}: rank {rank} is not among its {len(entry.participants)} participants"
            )
    if payloads:
        limit = payload_limit(len(entry.participants))
        largest = max(map(len, payloads))
        if largest > limit:
            raise QuotaExceeded(
                f"{entry.key}: a payload of {largest} bytes is above {limit}",
                hint="a payload is for addresses and digests; pass data through storage",
            )
    if (payloads and len(payloads) != len(ranks)) or (arrival.phases and len(arrival.phases) != len(ranks)):
        raise InvalidArgument(f"{entry.key}: give one payload and one phase for each rank, or none")
    if not (0 <= arrival.age_ms <= MAX_TIME_MS and 0 <= arrival.timeout_ms <= MAX_TIME_MS):
        raise InvalidArgument(
            f"{entry.key}: an age of {arrival.age_ms} ms, a timeout of {arrival.timeout_ms} ms",
            hint=f"both are from 0 to {MAX_TIME_MS}",
        )


def _merge(entry: OpenRound, arrival: Arrival, now_ms: float) -> None:
    """Add the ranks to the round. Of each rank, the first payload and the oldest age count."""
    came_ms = now_ms - arrival.age_ms
    entry.since_ms = min(entry.since_ms, came_ms)
    if arrival.timeout_ms:
        deadline_ms = came_ms + arrival.timeout_ms
        if entry.deadline_ms is None or deadline_ms < entry.deadline_ms:
            entry.deadline_ms = deadline_ms
    if arrival.phases:
        shown = (phase[:MAX_PHASE_CHARS] for phase in arrival.phases)
        entry.phases.update(zip(arrival.ranks, shown, strict=True))
    payloads = arrival.payloads or (b"",) * len(arrival.ranks)
    for rank, payload in zip(arrival.ranks, payloads, strict=True):
        entry.arrived.setdefault(rank, payload)
