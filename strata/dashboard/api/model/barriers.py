"""Barriers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRank:
    rank: int
    worker_id: str
    host: str
    step: int | None
    phase: str
    last_seen_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBarrier:
    name: str
    generation: int
    round: int
    arrived: int
    expected: int
    age_ms: int
    missing_total: int
    missing_ranks: str
    """All missing ranks, as in `0-3, 7`."""
    missing: tuple[MissingRank, ...]
    """The first twenty missing ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedBarrier:
    name: str
    generation: int
    round: int
    result: str
    """`released`, `timed_out`, `broken`."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    le_s: float | None
    """Upper bound in seconds; None for the last bucket."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Barriers:
    open: tuple[OpenBarrier, ...]
    ended: tuple[EndedBarrier, ...]
    latency: tuple[Bucket, ...]
    """Number of this job's rounds that were open at this replica, by the time from the first arrival to the
    outcome.
    """
