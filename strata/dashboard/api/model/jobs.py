"""Jobs: progress, findings, use of time, generations and events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a training is, from what its ranks reported."""

    step: int | None
    """The step of the rank that is furthest behind."""
    step_high: int | None
    epoch: int | None
    samples: int | None
    target_step: int | None
    """The last step, if the program named it (`strata.init(total_steps=…)`)."""
    eta_ms: int | None
    steps_per_s: float | None
    samples_per_s: float | None
    since_step_ms: int | None
    """Time since the slowest rank completed a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a job; `text` is the sentence that commands, metrics and logs show as well."""

    kind: str
    """`stalled`, `crashed`, `slow`, `held`, `device`, `invariant`."""
    text: str
    ranks: tuple[int, ...] = ()
    worker_id: str = ""
    host: str = ""
    device: int | None = None
    cause: str = ""
    since_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """Summary of one job. If the job cannot be read, `unreadable` has the reason."""

    name: str
    phase: str
    """`waiting`, `running`, `stopping`, `paused`, `done`, `failed`, `unreadable`."""
    reason: str = ""
    generation: int = 0
    ranks: int = 0
    members: int = 0
    standbys: int = 0
    min_workers: int = 0
    max_workers: int = 0
    progress: Progress | None = None
    goodput_ratio: float | None = None
    checkpoint_step: int | None = None
    """The step of the latest committed checkpoint."""
    open_barriers: int = 0
    finding: str = ""
    """The worst of the job's findings."""
    unreadable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Jobs: running ones first, then the others, both sorted by name."""

    jobs: tuple[JobSummary, ...]
    total: int
    """The number of all jobs that match."""
    next_page_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPart:
    cause: str
    """`step` is the useful cause; docs/training.md lists the other causes."""
    seconds: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The wall time of a job by cause: the parts sum to `wall_s`."""

    wall_s: float
    ratio: float
    parts: tuple[GoodputPart, ...]
    """The useful part, then the others, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The stop request of the current generation, and how many ranks have stopped."""

    action: str
    reason: str
    workers: tuple[str, ...]
    grace_ms: int
    stopped: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    summary: JobSummary
    restored_step: int | None
    failed_in_a_row: int
    """Number of consecutive generations that ended in a failure without a committed checkpoint."""
    max_failed_in_a_row: int
    findings: tuple[Finding, ...]
    notice: Notice | None
    goodput: Goodput | None
    reported: dict[str, float | None]
    """The newest value of each name that the program reported (`run.report(loss=…)`); None: not a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation. `committed_step` is known once it has ended."""

    generation: int
    began_unix_ms: int
    members: int
    ranks: int
    restored_step: int | None
    committed_step: int | None
    failure: bool
    """Whether a failure ended the previous generation."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generations:
    """The newest first."""

    generations: tuple[Generation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    unix_ms: int
    revision: int
    kind: str
    job: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """The newest first."""

    events: tuple[Event, ...]
