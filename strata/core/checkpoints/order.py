"""Which checkpoint is newer, and which one a world begins from (PROTOCOLS 8.4).

The order is (generation, step): what a later world saved counts as newer, whatever its step. A
world that restores from step s takes that record over: `latest` names it under the new
generation. What older generations had saved beyond s is thereby *superseded*: it belongs to a
history that was given up, never counts as newer, and is restored only by explicit request. So does
all that a job had saved before it was begun anew (`J/anew`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from strata.core.checkpoints.references import Rewind
from strata.core.checkpoints.tiers import within_reach
from strata.core.job import JobView
from strata.core.kv.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    Latest,
    RestorePoint,
)
from strata.core.kv.view import Entry

RESTORABLE_TYPES = frozenset({CheckpointType.FULL, CheckpointType.INCREMENTAL})
"""The types that hold the whole state; only they move `latest`."""


def order(record: CheckpointRecord) -> tuple[int, int]:
    """Return the key by which records are compared: (generation, step)."""
    return record.generation, record.step


def restorations(job: JobView) -> Iterator[tuple[int, int]]:
    """Yield (generation, step) for every world that began from a checkpoint."""
    for name in job.view.names(job.keys.worlds):
        step = job.restored(int(name))
        if step is not None:
            yield int(name), step


def superseded(job: JobView, record: CheckpointRecord) -> bool:
    """Tell whether a later world went back behind this record, or the job was begun anew after it.

    The record that `latest` names counts, whatever it was before a world took it over.
    """
    return not is_latest(job, record) and (
        record.generation <= job.anew()
        or any(g > record.generation and record.step > s for g, s in restorations(job))
    )


def supersedes_any(job: JobView, generation: int) -> bool:
    """Tell whether `worlds/<generation>/restored` still gives a record up.

    While it does, housekeeping keeps that key: without it the record would count again.
    """
    step = job.restored(generation)
    return step is not None and any(
        e.record.generation < generation and e.record.step > step for e in job.checkpoints()
    )


def find(job: JobView, step: int, attempt: str = "") -> Entry[CheckpointRecord] | None:
    """Return the record of that attempt at `step`; without an attempt, the newest at `step`."""
    entries = [
        e
        for e in job.view.entries(job.keys.checkpoint_step(step), CheckpointRecord)
        if attempt in {"", e.record.attempt}
    ]
    return max(entries, key=lambda e: e.record.generation, default=None)


def is_latest(job: JobView, record: CheckpointRecord) -> bool:
    """Tell whether `latest` names this very record."""
    entry = job.latest()
    return entry is not None and record.where == (
        entry.record.step,
        entry.record.record_generation,
        entry.record.attempt,
    )


def newest(
    job: JobView, *, before: tuple[int, int] | None = None, hosts: Collection[str] | None = None
) -> Entry[CheckpointRecord] | None:
    """Return the newest committed record that holds a whole state and is not superseded.

    That is the one `latest` names, as long as it is COMMITTED; the best of the others once it
    has turned out to be CORRUPT. With `before`, the newest one that counts less than that. With `hosts`,
    the newest that a world on these hosts can read.
    """
    good = (
        (counts(job, e.record), e)
        for e in job.checkpoints()
        if e.record.state is CheckpointState.COMMITTED
        and e.record.type in RESTORABLE_TYPES
        and not superseded(job, e.record)
        and (hosts is None or within_reach(job, e.record, hosts))
    )
    wanted = (pair for pair in good if before is None or pair[0] < before)
    return max(wanted, key=lambda pair: pair[0], default=((0, 0), None))[1]


def counts(job: JobView, record: CheckpointRecord) -> tuple[int, int]:
    """Return what a record counts as: its own order, or where the world that took it over has it."""
    latest = job.latest()
    if latest is not None and is_latest(job, record):
        return latest.record.generation, latest.record.step
    return order(record)


def restore_point(job: JobView, hosts: Collection[str] | None = None) -> RestorePoint | None:
    """Return where the next world, whose members run on `hosts`, begins; None: from nothing.

    It is the record that somebody asked to go back to, or else the newest; of those within reach.
    """
    rewind = asked_back(job)
    back = find(job, rewind.record.step, rewind.record.attempt) if rewind is not None else None
    if back is not None and (hosts is None or within_reach(job, back.record, hosts)):
        return point_of(back.record)
    entry = newest(job, hosts=hosts)
    return None if entry is None else point_of(entry.record)


def asked_back(job: JobView) -> Entry[Rewind] | None:
    """Return the request to go back, while it counts: it is over once its checkpoint cannot be restored.

    It does not come back, so what rests on a request that is over need not compare why it is. The head of the
    world that goes back takes the key away.
    """
    rewind = job.rewind()
    back = find(job, rewind.record.step, rewind.record.attempt) if rewind is not None else None
    return rewind if back is not None and back.record.state is CheckpointState.COMMITTED else None


def point_of(record: CheckpointRecord) -> RestorePoint:
    """Return the restore point that this record is."""
    return RestorePoint(step=record.step, attempt=record.attempt, record_generation=record.generation)


def latest_under(generation: int, point: RestorePoint) -> Latest:
    """Return `latest` as the head of a world that begins from `point` writes it."""
    return Latest(
        generation=generation,
        step=point.step,
        attempt=point.attempt,
        record_generation=point.record_generation,
    )
