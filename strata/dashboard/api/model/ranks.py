"""Ranks, their devices, and how their steps went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One registered member, and the age of its last heartbeat."""

    worker_id: str
    incarnation: int
    host: str
    pid: int
    slots: int
    first_rank: int | None
    """The member's first rank; None for a standby."""
    standby: bool
    lost: bool
    """The member has a place in this generation, is not registered any more, and has ranks that are not done."""
    leaving: bool
    """The member was requested to leave."""
    heartbeat_age_ms: int | None
    done: bool = False
    """All ranks of the member are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """All ranks of the current generation, column by column: each list has one value for each rank, in the
    order of ranks.
    """

    generation: int
    size: int
    workers: tuple[Worker, ...]
    worker: tuple[int, ...]
    """Index into `workers`; -1 if unknown."""
    step: tuple[int | None, ...]
    phases: tuple[str, ...]
    """The phases that `phase` counts."""
    phase: tuple[int, ...]
    """Index into `phases`."""
    last_seen_ms: tuple[int | None, ...]
    """Time since the rank's last report."""
    stalled_ms: tuple[int, ...]
    """How long the rank has been stuck; 0 while it is not stuck."""
    compute_us: tuple[int | None, ...]
    """Compute time of the rank's last step, without waiting for other ranks."""
    median_compute_us: tuple[int | None, ...]
    relative_score: tuple[float | None, ...]
    """Compute time of the fastest rank divided by this rank's compute time: 1 is as fast as the fastest."""
    own_score: tuple[float | None, ...]
    """The rank's best compute time divided by its present compute time: 1 is as fast as ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator of a member; None for readings that its driver does not offer."""

    worker_id: str
    index: int
    name: str
    uuid: str
    utilization_percent: int | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: int | None
    power_mw: int | None
    ecc_uncorrected: int | None
    xids: tuple[int, ...]
    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """The last lines of one process of a rank."""

    generation: int
    """The generation in which that process began."""
    file: str
    ended: str
    """How it ended; empty while it runs."""
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank, with the evidence that is fetched while a client views it."""

    rank: int
    worker_id: str
    host: str
    step: int | None
    phase: str
    last_seen_ms: int | None
    stalled_ms: int
    compute_us: int | None
    median_compute_us: int | None
    relative_score: float | None
    own_score: float | None
    finding: str
    stack: str
    trace_file: str
    trace_bytes: int
    log: tuple[str, ...]
    """The last lines that the rank's process wrote, if the rank's agent keeps them."""
    log_file: str | None
    """The file in which the agent keeps these lines; empty if the agent keeps none, None if it has not answered
    lately.
    """
    log_generation: int | None
    """The generation in which that process began."""
    log_ended: str
    """How that process ended; empty while it runs."""
    log_before: RankLog | None
    """The last lines of the rank's previous process, if that process ran on this host."""
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """Compute time of the last step that each rank reported in each interval; None if the rank reported no step."""

    generation: int
    from_unix_ms: int
    interval_ms: int
    ranks: int
    columns: tuple[tuple[int | None, ...], ...]
    """One column for each interval, with one value for each rank, in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    unit: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Series of values from `from_unix_ms` on, one value every `interval_ms`, oldest first. All series have the
    same length.

    Names: `steps_per_s`, `samples_per_s`, `step`, `step_time_p50`, `step_time_p90`, `step_time_p99`, `save_s`,
    `commit_s`, `goodput`, `goodput.CAUSE` (seconds since the beginning), `ranks`; `reported.NAME` for what the program
    reported.
    """

    from_unix_ms: int
    interval_ms: int
    series: dict[str, Series]
