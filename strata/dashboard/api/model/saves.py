"""Datasets and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    name: str
    shards: int
    uri: str
    assignment_version: int
    generation: int
    owned: dict[str, int]
    """How many shards each worker owns."""
    moved: int
    """Number of shards that are assigned to another worker than the hash ring alone would choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far completed steps had used a dataset at the latest committed checkpoint."""

    dataset: str
    step: int
    epoch: int
    samples: int
    length: int | None
    """Samples of an epoch; None: unknown."""
    order: str
    """Names the definition of the order of samples, such as "order-v1"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    datasets: tuple[Dataset, ...]
    cursors: tuple[Cursor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    tier: str
    path: str
    state: str
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    step: int
    attempt: str
    generation: int
    epoch: int
    type: str
    state: str
    acked: int
    ranks: int
    missing_ranks: str
    """The ranks whose acknowledgement an open save waits for."""
    size_bytes: int
    created_unix_ms: int
    path: str
    reason: str
    latest: bool
    pinned: bool
    tags: tuple[str, ...]
    base_step: int | None
    copies: tuple[Copy, ...]
    origin_job: str
    """For a fork: the job whose folder has the bytes; empty if the bytes are in this job's folder."""
    references: int
    """Number of other checkpoints, also of forks in other jobs, that use this checkpoint's bytes. If not 0, it
    cannot be deleted.
    """
    readers: int
    suspected: tuple[str, ...]
    """Tiers whose copy was reported as damaged by one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The newest first."""

    checkpoints: tuple[Checkpoint, ...]
    total: int
    next_page_token: str
