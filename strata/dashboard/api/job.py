"""One job: its findings, goodput, notice, generations and events."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from strata.coordinator.status.job_phases import phase_of
from strata.core.health.findings import Finding
from strata.core.health.goodput import STEP
from strata.core.health.goodput import Goodput as Account
from strata.core.job import JobView
from strata.core.stop.requests import active_world
from strata.dashboard.api import model
from strata.dashboard.api.cluster import OVER, job_summary
from strata.dashboard.source import Source

EVENTS: Final = 200


def job(source: Source, name: str) -> model.Job | None:
    """Return a job, or None if it does not exist; raise `PoisonRecord` if it cannot be read."""
    view = JobView(source.view, source.keys.job(name))
    if not view.exists:
        return None
    world, spec, charts = view.world(), view.spec(), source.charts.job(name)
    account = (
        charts.goodput(source.loop_now_ms() / 1000, over=phase_of(source.view, source.keys, name) in OVER)
        if charts is not None
        else None
    )
    reported = charts.training.reported if charts is not None and charts.training is not None else {}
    return model.Job(
        summary=job_summary(source, name),
        restored_step=world.head.restore.step if world is not None and world.head.restore else None,
        failed_in_a_row=world.head.no_progress if world is not None else 0,
        max_failed_in_a_row=spec.record.max_no_progress_generations if spec is not None else 0,
        findings=tuple(map(_finding, source.diagnosis(name).findings)),
        notice=_notice(view),
        goodput=_goodput(account) if account is not None else None,
        reported={each: value if math.isfinite(value) else None for each, value in sorted(reported.items())},
    )


def _goodput(account: Account) -> model.Goodput:
    wall_s = account.total_s
    parts = sorted(account.spent_s.items(), key=lambda part: (part[0] != STEP, -part[1]))
    return model.Goodput(
        wall_s=wall_s,
        ratio=account.ratio,
        parts=tuple(
            model.GoodputPart(cause=cause, seconds=seconds, ratio=seconds / wall_s if wall_s > 0 else 0.0)
            for cause, seconds in parts
        ),
    )


def _finding(found: Finding) -> model.Finding:
    return model.Finding(
        kind=found.kind,
        text=found.text,
        ranks=found.ranks,
        worker_id=found.worker_id,
        host=found.host,
        device=found.device,
        cause=found.cause,
        since_ms=found.since_ms,
    )


def _notice(view: JobView) -> model.Notice | None:
    world = active_world(view)
    entry = None if world is None else view.notice(world.head.generation)
    if world is None or entry is None:
        return None
    record = entry.record
    return model.Notice(
        action=record.action.value,
        reason=record.reason,
        workers=tuple(record.workers),
        grace_ms=record.grace_ms,
        stopped=len(view.stopped(world.head.generation)),
        ranks=world.head.size,
    )


def generations(source: Source, name: str) -> model.Generations:
    """Return the recorded generations, the newest first."""
    view = JobView(source.view, source.keys.job(name))
    return model.Generations(
        generations=tuple(
            model.Generation(
                generation=int(entry.name),
                began_unix_ms=entry.record.began_unix_ms,
                members=entry.record.members,
                ranks=entry.record.size,
                restored_step=entry.record.restore.step if entry.record.restore is not None else None,
                committed_step=entry.record.committed_step,
                failure=entry.record.failure,
                reason=entry.record.reason,
            )
            for entry in reversed(view.history())
        )
    )


def events(
    source: Source, name: str | None, *, after: int = 0, limited_to: Collection[str] = ()
) -> model.Events:
    """Return the events after revision `after`, newest first: those of job `name`, or all events if it is None."""
    return model.Events(
        events=tuple(
            model.Event(
                unix_ms=int(each.unix_s * 1000),
                revision=each.revision,
                kind=each.kind,
                job=each.job,
                text=each.text,
            )
            for each in source.logged_events(name, limit=EVENTS)
            if each.revision > after and (not limited_to or each.job in limited_to)
        )
    )
