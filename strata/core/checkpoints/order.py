"""The order of checkpoints, and the choice of the checkpoint that a world begins from (PROTOCOLS 8.4).

The order is (generation, step): a checkpoint of a later world counts as newer, whatever its step. A
world that restores from step s takes that record over: `latest` names it under the new
generation. Checkpoints of older generations after step s are thereby *superseded*: training continued from s
without them. Superseded checkpoints never count as newer, and are restored only by explicit request. Beginning a
job anew (`J/anew`) supersedes all its earlier checkpoints in the same way.
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
    """Return whether a later world began from a step before this record's, or the job began anew after it.

    The record that `latest` names is never superseded, even if it was before a world restored from it.
    """
    return not is_latest(job, record) and (
        record.generation <= job.anew()
        or any(g > record.generation and record.step > s for g, s in restorations(job))
    )


def supersedes_any(job: JobView, generation: int) -> bool:
    """Return whether `worlds/<generation>/restored` still supersedes a record.

    While the key does so, housekeeping keeps it: without the key the record would count again.
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
    """Return whether `latest` names exactly this record."""
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

    This is the record that `latest` names, while that record is COMMITTED; if it is CORRUPT, the newest of the
    others. `before`: consider only records that are older than this position. `hosts`: consider only records that a
    world on these hosts can read.
    """
    good = (
        (counts(job, e.record), e)
        for e in job.checkpoints()
        if e.record.state is CheckpointState.COMMITTED
        and e.record.type in RESTORABLE_TYPES
        and not superseded(job, e.record)
        and (hosts is None or within_reach(job, e.record, hosts))
    )
    candidates = (pair for pair in good if before is None or pair[0] < before)
    return max(candidates, key=lambda pair: pair[0], default=((0, 0), None))[1]


def counts(job: JobView, record: CheckpointRecord) -> tuple[int, int]:
    """Return a record's position in the order: its own, or the one in `latest` if a later world restored the record."""
    latest = job.latest()
    if latest is not None and is_latest(job, record):
        return latest.record.generation, latest.record.step
    return order(record)


def restore_point(job: JobView, hosts: Collection[str] | None = None) -> RestorePoint | None:
    """Return the restore point of the next world, whose members run on `hosts`; None: begin without a checkpoint.

    The restore point is the record of a rewind, or else the newest record. In both cases these hosts must be able
    to read the record.
    """
    rewind = pending_rewind(job)
    back = find(job, rewind.record.step, rewind.record.attempt) if rewind is not None else None
    if back is not None and (hosts is None or within_reach(job, back.record, hosts)):
        return point_of(back.record)
    entry = newest(job, hosts=hosts)
    return None if entry is None else point_of(entry.record)


def pending_rewind(job: JobView) -> Entry[Rewind] | None:
    """Return the rewind while it is valid, or None.

    A rewind ends once its checkpoint cannot be restored. An ended rewind never becomes valid again, so a plan based
    on its end need not compare the checkpoint. The head of the world that restores the rewind's checkpoint deletes
    the key.
    """
    rewind = job.rewind()
    back = find(job, rewind.record.step, rewind.record.attempt) if rewind is not None else None
    return rewind if back is not None and back.record.state is CheckpointState.COMMITTED else None


def point_of(record: CheckpointRecord) -> RestorePoint:
    """Return the restore point for this record."""
    return RestorePoint(step=record.step, attempt=record.attempt, record_generation=record.generation)


def latest_under(generation: int, point: RestorePoint) -> Latest:
    """Return the `latest` that the head of a world beginning from `point` writes."""
    return Latest(
        generation=generation,
        step=point.step,
        attempt=point.attempt,
        record_generation=point.record_generation,
    )
