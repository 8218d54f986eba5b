"""The cluster's state, and a summary of each of its jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from strata.coordinator.etcd.members import EtcdMember as Member
from strata.coordinator.status.job_phases import phase_of
from strata.core.checkpoints.lifecycle import newest
from strata.core.job import JobView
from strata.core.kv.records import JobPhase, Standbys
from strata.core.leadership.coordinators import unreachable
from strata.core.leadership.etcd_version import EtcdVersion, judge
from strata.dashboard.api import model
from strata.dashboard.source import Source
from strata.errors import StrataError
from strata.observe import words

PAGE: Final = 200
OVER: Final = frozenset({"done", "failed"})
FIRST: Final = ("running", "stopping", "waiting", "paused", "failed", "unreadable", "done")
"""The phases, in the order in which jobs are listed."""


def cluster(source: Source, etcd: Sequence[Member]) -> model.Cluster:
    """Return the cluster as this replica sees it."""
    leader = source.leader()
    ready, why_not = source.is_ready()
    healthy, why_unhealthy = source.is_healthy()
    members = tuple(_etcd(member) for member in etcd)
    phases = source.job_phases()
    return model.Cluster(
        cluster=source.keys.cluster,
        uid=source.uid,
        revision=source.view.revision,
        unix_ms=int(source.unix_now() * 1000),
        answered_by=source.replica,
        version=source.version,
        healthy=healthy,
        ready=ready,
        reason=why_unhealthy or why_not,
        leader=leader.record.replica if leader is not None else "",
        leader_epoch=leader.create_revision if leader is not None else 0,
        sessions=source.soft.session_count(),
        etcd_silence_ms=int(1000 * min(source.etcd_silence_s(), 1e9)),
        audit_differences=source.audit_differences(),
        alarms=tuple(_alarms(source, members)),
        replicas=tuple(sorted(_replicas(source), key=lambda each: each.replica)),
        etcd=members,
        jobs_total=len(phases),
        jobs_by_phase=dict(Counter(phases.values())),
    )


def _alarms(source: Source, etcd: Sequence[model.EtcdMember]) -> Iterator[str]:
    if outage := source.outage():
        yield (
            f"{outage[:1].upper()}{outage[1:]}. Sessions and reads go on; no barrier is released, no save is"
            " committed, and no member is declared dead."
        )
    if source.leader() is None:
        yield (
            "There is no leader: barriers and saves go on, but no new generation begins until one of the coordinators"
            " reaches etcd and becomes leader."
        )
    if source.audit_differences():
        yield (
            f"{source.audit_differences()} keys of this replica's view differed from etcd. They were repaired; please"
            " report it."
        )
    lost = unreachable(source.view, source.keys)
    if lost:
        ready = sum(state.ready for state in source.replicas())
        yield (
            f"{', '.join(lost)} unreachable; {ready} of {len(source.replicas()) + len(lost)} coordinators ready. Start"
            f" it again, or remove it from the list: strata coordinators forget {next(iter(lost))}"
        )
    yield from sorted({member.warning for member in etcd if member.warning})


def _replicas(source: Source) -> Iterator[model.Replica]:
    for state in source.replicas():
        record = state.entry.record
        yield model.Replica(
            replica=state.entry.name,
            address=record.address,
            http_url=_url(record.http_address),
            version=record.version,
            leader=state.leader,
            ready=state.ready,
            reason=state.reason,
            answered=record.instance == source.instance,
        )
    for name, lost in unreachable(source.view, source.keys).items():
        since_unix_ms = lost.unreachable_since_unix_ms
        yield model.Replica(
            replica=name,
            address=lost.address,
            http_url="",
            version="",
            leader=False,
            ready=False,
            reason=words.unreachable(since_unix_ms, source.unix_now()),
            answered=False,
            unreachable=True,
            unreachable_since_unix_ms=since_unix_ms or None,
        )


def _url(address: str) -> str:
    return address if not address or address.startswith("https://") else f"http://{address}"


def _etcd(member: Member) -> model.EtcdMember:
    warning = ""
    if member.version:
        try:
            warning = judge(EtcdVersion.parse(member.version)).reason
        except ValueError:
            warning = f"{member.version} is no version of etcd that Strata knows"
    return model.EtcdMember(
        endpoint=member.endpoint,
        version=member.version,
        healthy=member.healthy,
        leader=member.leader,
        db_size_bytes=member.db_size_bytes,
        error=member.error,
        warning=warning,
    )


# -- jobs


async def jobs(
    source: Source,
    *,
    phase: str = "",
    text: str = "",
    page_token: str = "",
    limited_to: Collection[str] = (),
) -> model.Jobs:
    """Return a page of the jobs in `phase` whose names contain `text`, running ones first.

    `limited_to` are the jobs that the caller may read; empty: all.
    """
    found = sorted(
        (FIRST.index(at), name)
        for name, at in source.job_phases().items()
        if text.lower() in name.lower() and phase in ("", at) and (not limited_to or name in limited_to)
    )
    keyed = [(f"{order}/{name}", name) for order, name in found]
    rest = [(key, name) for key, name in keyed if key > page_token]
    summaries = []
    for _key, name in rest[:PAGE]:
        summaries.append(job_summary(source, name))
        await asyncio.sleep(0)  # a diagnosis of a thousand ranks takes 16 ms
    return model.Jobs(
        jobs=tuple(summaries),
        total=len(found),
        next_page_token=rest[PAGE - 1][0] if len(rest) > PAGE else "",
    )


def job_summary(source: Source, name: str) -> model.JobSummary:
    """Return the summary of a job; if the job cannot be read, `unreadable` has the error."""
    try:
        return _summary(source, JobView(source.view, source.keys.job(name)))
    except StrataError as error:
        return model.JobSummary(name=name, phase="unreadable", unreadable=error.message)


def _summary(source: Source, job: JobView) -> model.JobSummary:
    head, spec, name = job.head(), job.spec(), job.keys.name
    record = job.view.record(job.keys.phase, JobPhase)
    standbys = job.view.record(job.keys.standbys, Standbys)
    latest, charts = newest(job), source.charts.job(name)
    goodput = (
        charts.goodput(source.loop_now_ms() / 1000, over=phase_of(source.view, source.keys, name) in OVER)
        if charts is not None
        else None
    )
    reason_from = record if record is not None else head.record if head is not None else None
    return model.JobSummary(
        name=name,
        phase=phase_of(source.view, source.keys, name),
        reason=reason_from.reason if reason_from is not None else "",
        generation=head.record.generation if head is not None else 0,
        ranks=head.record.size if head is not None else 0,
        members=job.view.count(job.keys.workers),
        standbys=len(standbys.workers) if standbys is not None else 0,
        min_workers=spec.record.min_workers if spec is not None else 0,
        max_workers=spec.record.max_workers if spec is not None else 0,
        progress=progress(source, job),
        goodput_ratio=goodput.ratio if goodput is not None else None,
        checkpoint_step=latest.record.step if latest is not None else None,
        open_barriers=sum(1 for _ in source.soft.open_rounds(name)),
        finding=source.diagnosis(name).says,
    )


def progress(source: Source, job: JobView) -> model.Progress | None:
    """Return how far a training has come; None before the job's ranks reported anything."""
    head = job.head()
    if head is None:
        return None
    generation, reports = source.soft.reported(job.keys.name)
    if generation != head.record.generation or not reports:
        return None
    now_s = source.loop_now_ms() / 1000
    charts = source.charts.job(job.keys.name)
    training = charts.training if charts is not None else None
    low = min(report.step for report in reports.values())
    rate = charts.steps.per_s(now_s) if charts is not None else None
    since_s = charts.steps.since_s(now_s) if charts is not None else None
    target = training.target_step if training is not None else 0
    return model.Progress(
        step=low,
        step_high=max(report.step for report in reports.values()),
        epoch=training.epoch if training is not None else None,
        samples=training.samples if training is not None else None,
        target_step=target or None,
        eta_ms=int(1000 * max(0, target - low) / rate) if target and rate else None,
        steps_per_s=rate,
        samples_per_s=charts.samples.per_s(now_s) if charts is not None and training is not None else None,
        since_step_ms=int(1000 * since_s) if since_s is not None else None,
    )
