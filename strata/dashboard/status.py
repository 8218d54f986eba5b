"""What the page says, as data: `/api/status` is this and nothing else, and the pages are drawn from it.

Made from one state of the view, synchronously, and bounded: a job of a thousand ranks is summed up, and
its members and ranks come in pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strata.coordinator.context import EtcdMember
from strata.coordinator.diagnosis import diagnose_world
from strata.core.checkpoints import newest
from strata.core.etcd_version import EtcdVersion, judge
from strata.core.job import JobView, job_names
from strata.core.records import JobPhase, Phase, Standbys
from strata.core.stopping import active_world
from strata.dashboard.choosing import shown_jobs
from strata.dashboard.source import Source
from strata.errors import StrataError
from strata.v1.members_pb2 import RankProgress

EVENTS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    replica: str
    address: str
    http_address: str
    version: str
    leader: bool
    ready: bool
    reason: str
    answered: bool
    """Whether it is the one that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdStatus:
    endpoint: str
    version: str
    healthy: bool
    leader: bool
    db_size_bytes: int
    error: str
    warning: str
    """Known bugs of its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job in a line. `unreadable` says why there is nothing more of it."""

    name: str
    phase: str = ""
    reason: str = ""
    generation: int = 0
    world_size: int = 0
    world_members: int = 0
    members: int = 0
    standbys: int = 0
    min_workers: int = 0
    max_workers: int = 0
    latest_step: int | None = None
    step_low: int | None = None
    step_high: int | None = None
    open_barriers: int = 0
    trouble: str = ""
    """What is wrong with its ranks and devices, in a sentence."""
    unreadable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStatus:
    unix_ms: int
    revision: int
    kind: str
    job: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
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
    outage: str
    """Why nothing can be written, at any replica; empty as long as something can."""
    leader: str
    leader_epoch: int
    sessions: int
    etcd_silence_s: float
    audit_differences: int
    replicas: tuple[ReplicaStatus, ...]
    etcd: tuple[EtcdStatus, ...]
    jobs: tuple[JobStatus, ...]
    job_count: int
    """Of all jobs: `jobs` has at most `MAX_JOBS`."""
    events: tuple[EventStatus, ...]


def cluster_status(source: Source, etcd: Sequence[EtcdMember], *, with_jobs: bool = True) -> ClusterStatus:
    """Return the cluster as `source` sees it now; for the page of one job without all the jobs."""
    leader = source.leader()
    ready, why_not = source.is_ready()
    healthy, ill = source.is_healthy()
    return ClusterStatus(
        cluster=source.keys.cluster,
        uid=source.uid,
        revision=source.view.revision,
        unix_ms=int(source.unix_now() * 1000),
        answered_by=source.replica,
        version=source.version,
        healthy=healthy,
        ready=ready,
        reason=ill or why_not,
        outage=source.outage(),
        leader=leader.record.replica if leader is not None else "",
        leader_epoch=leader.create_revision if leader is not None else 0,
        sessions=source.soft.session_count() if source.soft is not None else 0,
        etcd_silence_s=min(source.etcd_silence_s(), 1e9),
        audit_differences=source.audit_differences(),
        replicas=tuple(_replicas(source)),
        etcd=tuple(_etcd(member) for member in etcd),
        jobs=tuple(job_status(source, name) for name in shown_jobs(source.view, source.keys))
        if with_jobs
        else (),
        job_count=len(job_names(source.view, source.keys)),
        events=events(source, None),
    )


def job_status(source: Source, name: str) -> JobStatus:
    """Return one job in a line; one that cannot be read says why."""
    try:
        job = JobView(source.view, source.keys.job(name))
        return job_line(source, job, _said(source, job))
    except StrataError as error:  # written by hand: a record, or the name itself
        return JobStatus(name=name, phase="unreadable", unreadable=error.message)


def events(source: Source, job: str | None) -> tuple[EventStatus, ...]:
    """Return what happened lately, newest first."""
    return tuple(
        EventStatus(unix_ms=int(h.unix_s * 1000), revision=h.revision, kind=h.kind, job=h.job, text=h.text)
        for h in source.happenings(job, limit=EVENTS)
    )


def as_json(status: Any) -> dict[str, Any]:
    """Return any of these as what `json.dumps` takes."""
    return dataclasses.asdict(status)


def _replicas(source: Source) -> list[ReplicaStatus]:
    return [
        ReplicaStatus(
            replica=state.entry.name,
            address=state.entry.record.address,
            http_address=state.entry.record.http_address,
            version=state.entry.record.version,
            leader=state.leader,
            ready=state.ready,
            reason=state.reason,
            answered=state.entry.record.instance == source.instance,
        )
        for state in source.replicas()
    ]


def _etcd(member: EtcdMember) -> EtcdStatus:
    warning = ""
    if member.version:
        try:
            warning = judge(EtcdVersion.parse(member.version)).reason
        except ValueError:
            warning = f"{member.version} is no version of etcd that Strata knows"
    return EtcdStatus(
        endpoint=member.endpoint,
        version=member.version,
        healthy=member.healthy,
        leader=member.leader,
        db_size_bytes=member.db_size_bytes,
        error=member.error,
        warning=warning,
    )


def _said(source: Source, job: JobView) -> list[RankProgress]:
    """Return what the ranks of the current generation last said."""
    head = job.head()
    if head is None or source.soft is None:
        return []
    return source.soft.progress(job.keys.name, head.record.generation, range(head.record.size))


def job_line(source: Source, job: JobView, said: Collection[RankProgress]) -> JobStatus:
    """Return a job in a line, its ranks having said `said`; `PoisonRecord` if it cannot be read."""
    steps = [progress.step for progress in said]
    world = job.world()
    head, spec, name = job.head(), job.spec(), job.keys.name
    record = job.view.record(job.keys.phase, JobPhase)
    standbys = job.view.record(job.keys.standbys, Standbys)
    latest = newest(job)
    size = head.record.size if head is not None else 0
    phase = record.phase if record is not None else Phase.RUNNING
    reason = record.reason if record is not None else head.record.reason if head is not None else ""
    return JobStatus(
        name=name,
        phase=_phase(job, phase, size),
        reason=reason,
        generation=head.record.generation if head is not None else 0,
        world_size=size,
        world_members=head.record.members if head is not None else 0,
        members=len(job.view.names(job.keys.workers)),
        standbys=len(standbys.workers) if standbys is not None else 0,
        min_workers=spec.record.min_workers if spec is not None else 0,
        max_workers=spec.record.max_workers if spec is not None else 0,
        latest_step=latest.record.step if latest is not None else None,
        step_low=min(steps, default=None),
        step_high=max(steps, default=None),
        open_barriers=sum(1 for _ in source.soft.open_rounds(name)) if source.soft is not None else 0,
        trouble=diagnose_world(source.soft, job, said, world).says
        if source.soft is not None and world is not None
        else "",
    )


def _phase(job: JobView, phase: Phase, size: int) -> str:
    """Return where a job stands as people see it: it may wait for members, or be about to stop."""
    if phase is not Phase.RUNNING:
        return str(phase.value)
    if not size:
        return "waiting"
    world = active_world(job)
    asked = world is not None and job.notice(world.head.generation) is not None
    return "stopping" if asked else str(phase.value)
