"""The resources of the HTTP API, as data; `openapi.json` is generated from these classes.

A resource is what `GET` of its path returns. Fields are only ever added. Times of day are milliseconds since 1970,
ages and durations name their unit. None is for what nobody has reported yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An answer other than 2xx: what is wrong, and what to do."""

    error: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Me:
    """The caller as the replica knows it. `role` is empty if the replica asks nobody who they are."""

    identity: str
    role: str
    jobs: tuple[str, ...]
    """The jobs that the caller is limited to; empty: all."""
    may_operate: bool
    """Whether the caller may pin, tag, fork and delete checkpoints here."""
    cluster: str
    replica: str
    version: str


# -- cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One registered coordinator."""

    replica: str
    address: str
    http_url: str
    """Where it serves this API; empty if nowhere."""
    version: str
    leader: bool
    ready: bool
    reason: str
    answered: bool
    """Whether this is the replica that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMember:
    endpoint: str
    version: str
    healthy: bool
    leader: bool
    db_size_bytes: int
    error: str
    warning: str
    """Known bugs of its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster as one replica sees it at `revision`."""

    cluster: str
    uid: str
    revision: int
    unix_ms: int
    answered_by: str
    version: str
    healthy: bool
    ready: bool
    reason: str
    leader: str
    leader_epoch: int
    sessions: int
    etcd_silence_ms: int
    audit_differences: int
    alarms: tuple[str, ...]
    """What an operator has to see to, in sentences; empty if nothing."""
    replicas: tuple[Replica, ...]
    etcd: tuple[EtcdMember, ...]
    jobs_total: int
    jobs_by_phase: dict[str, int]


# -- jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a training is, from what its ranks reported."""

    step: int | None
    """Of the rank that is furthest behind."""
    step_high: int | None
    epoch: int | None
    samples: int | None
    target_step: int | None
    """The last step, if the program named it (`strata.init(total_steps=…)`)."""
    eta_ms: int | None
    steps_per_s: float | None
    samples_per_s: float | None
    since_step_ms: int | None
    """Since the slowest rank completed a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a job; `text` is the sentence that commands, metrics and logs show as well."""

    kind: str
    """`stalled`, `slow`, `held`, `device`, `invariant`."""
    text: str
    ranks: tuple[int, ...] = ()
    worker_id: str = ""
    host: str = ""
    device: int | None = None
    cause: str = ""
    since_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """One job in a line. `unreadable` says why there is nothing more of it."""

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
    """Of the latest committed checkpoint."""
    open_barriers: int = 0
    finding: str = ""
    """The worst of its findings."""
    unreadable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Running jobs first, then the others, each by name."""

    jobs: tuple[JobSummary, ...]
    total: int
    """Of all that match."""
    next_page_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPart:
    cause: str
    """`step` is the useful one; docs/training.md lists the others."""
    seconds: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What the wall time of a job went to: the parts sum to `wall_s`."""

    wall_s: float
    ratio: float
    parts: tuple[GoodputPart, ...]
    """The useful part first, then the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What the ranks of the current generation are asked for, and how many have stopped."""

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
    """Generations without a committed checkpoint that ended in a failure, one after the other."""
    max_failed_in_a_row: int
    findings: tuple[Finding, ...]
    notice: Notice | None
    goodput: Goodput | None
    reported: dict[str, float | None]
    """The newest value of each name that the program reported (`run.report(loss=…)`); None: not a number."""


# -- ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One registered member, and the last of its signs of life."""

    worker_id: str
    incarnation: int
    host: str
    pid: int
    slots: int
    first_rank: int | None
    """None for a standby."""
    standby: bool
    lost: bool
    """It has a place in this generation, and is not registered any more."""
    leaving: bool
    heartbeat_age_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """All ranks of the current generation, one list a column, in the order of ranks."""

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
    heard_ms: tuple[int | None, ...]
    """Since the rank reported something."""
    stalled_ms: tuple[int, ...]
    """How long it has been stuck; 0 while it is not."""
    compute_us: tuple[int | None, ...]
    """Compute time of its last step, without waiting for others."""
    median_compute_us: tuple[int | None, ...]
    relative_score: tuple[float | None, ...]
    """Compute time of the fastest rank over that of this one: 1 is as fast."""
    own_score: tuple[float | None, ...]
    """Its own best compute time over the present one: 1 is as fast as ever."""


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
class Rank:
    """One rank, with the evidence that is fetched while somebody looks at it."""

    rank: int
    worker_id: str
    host: str
    step: int | None
    phase: str
    heard_ms: int | None
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
    """The last lines that it wrote, if its agent keeps them."""
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """Median compute time by rank and time. A rank that reported nothing in an interval has None."""

    generation: int
    from_unix_ms: int
    interval_ms: int
    ranks: int
    columns: tuple[tuple[int | None, ...], ...]
    """By time, then by rank; in microseconds."""


# -- history


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    unit: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Values of `from_unix_ms`, one every `interval_ms`, oldest first. All series are equally long.

    Names: `steps_per_s`, `samples_per_s`, `step`, `step_time_p50`, `step_time_p90`, `step_time_p99`, `save_s`,
    `commit_s`, `goodput`, `goodput.CAUSE` (seconds since the beginning), `ranks`; `reported.NAME` for what the program
    reported.
    """

    from_unix_ms: int
    interval_ms: int
    series: dict[str, Series]


# -- barriers


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRank:
    rank: int
    worker_id: str
    host: str
    step: int | None
    phase: str
    heard_ms: int | None


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
    """All of them, as in `0-3, 7`."""
    missing: tuple[MissingRank, ...]
    """The first twenty."""


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
    """Upper bound; None for the last one."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Barriers:
    open: tuple[OpenBarrier, ...]
    ended: tuple[EndedBarrier, ...]
    latency: tuple[Bucket, ...]
    """Rounds of this job that were open at this replica, by the time from the first arrival to the outcome."""


# -- data


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
    """Shards that are not where the ring alone would put them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a dataset was read, as of the latest committed checkpoint."""

    dataset: str
    step: int
    epoch: int | None
    samples: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    datasets: tuple[Dataset, ...]
    cursors: tuple[Cursor, ...]


# -- checkpoints


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
    """The ranks whose acknowledgement an open one waits for."""
    size_bytes: int
    created_unix_ms: int
    path: str
    reason: str
    latest: bool
    pinned: bool
    tags: tuple[str, ...]
    base_step: int | None
    copies: tuple[Copy, ...]
    references: int
    """Checkpoints and jobs that use its bytes: what is stored once for several."""
    readers: int
    suspected: tuple[str, ...]
    """Tiers whose copy one host found damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The newest first."""

    checkpoints: tuple[Checkpoint, ...]
    total: int
    next_page_token: str


# -- what happened


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
    """Whether a failure ended the one before."""
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


# -- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAction:
    """The body of an action on one checkpoint. `attempt` may be empty if the step has one only."""

    attempt: str = ""
    why: str = ""
    tag: str = ""
    """Of `tag` and `untag`."""
    into: str = ""
    """Of `fork`: the job that is to begin from it."""


# -- the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The data of one server-sent event: `GET` of `path` returns `body` now.

    Of `events` and `history`, `body` has what is newer than in the change before, and belongs behind it.
    """

    path: str
    body: object = field(default=None)
