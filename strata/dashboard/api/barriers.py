"""The barriers of a job: the ranks missing at open rounds, outcomes of ended rounds, latencies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from strata.coordinator.calls.barriers import outcomes
from strata.core.barriers.arrivals import OpenRound
from strata.core.job import JobView
from strata.core.words import ranks_text
from strata.dashboard.api import model
from strata.dashboard.api.ranks import ranks
from strata.dashboard.source import Source

MISSING: Final = 20
ENDED: Final = 50


def barriers(source: Source, name: str) -> model.Barriers:
    """Return the open rounds, oldest first, and the rounds that ended last."""
    job = JobView(source.view, source.keys.job(name))
    open_rounds = sorted(source.soft.open_rounds(name), key=lambda each: each.since_ms)
    ended = sorted(outcomes(job), key=lambda each: each[1].mod_revision, reverse=True)
    table = ranks(source, name) if open_rounds else None
    charts = source.charts.job(name)
    return model.Barriers(
        open=tuple(_open(source, each, table) for each in open_rounds),
        ended=tuple(
            model.EndedBarrier(
                name=key.name,
                generation=key.generation,
                round=key.round,
                result=outcome.record.result.value,
                reason=outcome.record.reason,
            )
            for key, outcome in ended[:ENDED]
        ),
        latency=tuple(_buckets(charts.rounds.cumulated())) if charts is not None else (),
    )


def _open(source: Source, round_: OpenRound, table: model.Ranks | None) -> model.OpenBarrier:
    missing = round_.missing()
    known = table if table is not None and table.generation == round_.key.generation else None
    return model.OpenBarrier(
        name=round_.key.name,
        generation=round_.key.generation,
        round=round_.key.round,
        arrived=len(round_.arrived),
        expected=len(round_.participants),
        age_ms=max(0, int(source.loop_now_ms() - round_.since_ms)),
        missing_total=len(missing),
        missing_ranks=ranks_text(missing),
        missing=tuple(_missing(rank, known) for rank in sorted(missing)[:MISSING]),
    )


def _missing(rank: int, table: model.Ranks | None) -> model.MissingRank:
    if table is None or rank >= table.size:
        return model.MissingRank(rank=rank, worker_id="", host="", step=None, phase="", last_seen_ms=None)
    worker = table.workers[table.worker[rank]] if table.worker[rank] >= 0 else None
    return model.MissingRank(
        rank=rank,
        worker_id=worker.worker_id if worker is not None else "",
        host=worker.host if worker is not None else "",
        step=table.step[rank],
        phase=table.phases[table.phase[rank]],
        last_seen_ms=table.last_seen_ms[rank],
    )


def _buckets(cumulated: Iterator[tuple[float, int]]) -> Iterator[model.Bucket]:
    before = 0
    for bound, count in cumulated:
        yield model.Bucket(le_s=bound if math.isfinite(bound) else None, count=count - before)
        before = count
