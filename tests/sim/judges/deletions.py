"""Rules for marking a checkpoint, or a copy of one, for deletion (PROTOCOLS 8.5 to 8.7).

The rules use the keyspace at the revision of the mark, and not the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator

from strata.core.checkpoints.references import CorruptionReport
from strata.core.job import JobView
from strata.core.kv.keys import JobKeys
from strata.core.kv.records import CheckpointRecord, CheckpointState, CheckpointType, Tier, TierState
from strata.core.kv.view import View

WHOLE = {CheckpointType.FULL, CheckpointType.INCREMENTAL}

AFTER_THE_COMMIT = {
    (CheckpointState.COMMITTED, CheckpointState.COMMITTED),
    (CheckpointState.COMMITTED, CheckpointState.DELETING),
    (CheckpointState.COMMITTED, CheckpointState.CORRUPT),
    (CheckpointState.CORRUPT, CheckpointState.DELETING),
    (CheckpointState.ABORTED, CheckpointState.DELETING),
    (CheckpointState.DELETING, CheckpointState.DELETING),
}
"""Further legal changes of a record's state in seeds with checkpoint maintenance."""


def burial_problems(
    view: View, keys: JobKeys, old: CheckpointRecord | None, new: CheckpointRecord
) -> Iterator[str]:
    """Yield the problems of a record's change from `old` to `new`, as of the revision of that change."""
    job = JobView(view, keys)
    opened = new.state is CheckpointState.OPEN and (old is None or old.attempt != new.attempt)
    if opened and new.type is CheckpointType.INCREMENTAL:
        yield from _base(job, new)
    dying = [] if opened else [name for name, tier in new.tiers.items() if _dies(old, name, tier)]
    if not dying:
        return
    where = (new.step, new.generation, new.attempt)
    latest = job.latest()
    if latest is not None and (latest.record.step, latest.record.record_generation) == where[:2]:
        yield "the latest was marked for deletion"
    for what, folder in (
        ("is referenced", keys.refs(*where)),
        ("is being read", keys.readers(*where)),
        ("is tagged", keys.tags_of(*where)),
    ):
        if names := view.names(folder):
            yield f"it was marked for deletion and {what} by {names}"
    if view.get(keys.pin(new.step, new.attempt)) is not None:
        yield "it was marked for deletion and is pinned"
    if old is not None and old.state is not CheckpointState.ABORTED:
        yield from _newer(job, old, dying)


def _dies(old: CheckpointRecord | None, name: str, tier: Tier) -> bool:
    before = old.tiers.get(name) if old is not None else None
    return tier.state is TierState.DELETING and (before is None or before.state is not TierState.DELETING)


def _base(job: JobView, new: CheckpointRecord) -> Iterator[str]:
    """Judge the start of an Incremental: its base and all that the base uses are committed, and referenced by it."""
    bases = [
        e.record
        for e in job.checkpoints()
        if (e.record.step, e.record.attempt) == (new.base_step, new.base_attempt)
    ]
    if not bases:
        yield f"it builds on {new.base_attempt}, which is not there"
    for base in bases:
        for entry in job.checkpoints():
            record = entry.record
            refs = job.view.names(job.keys.refs(record.step, record.generation, record.attempt))
            if record.attempt != base.attempt and base.attempt not in refs:
                continue
            if record.state is not CheckpointState.COMMITTED:
                yield f"it builds on step {record.step}, which is {record.state.value}"
            if new.attempt not in refs:
                yield f"it builds on step {record.step}, and nothing keeps that"
            lost = [n for n, tier in record.tiers.items() if tier.state is not TierState.PRESENT]
            absent = [n for n in new.tiers if n not in record.tiers] + lost
            if absent:
                yield f"it builds on step {record.step}, which is not on {absent} any more"


def _newer(job: JobView, old: CheckpointRecord, dying: list[str]) -> Iterator[str]:
    """Judge that a newer restorable checkpoint exists, also on each shared tier from which `old` is removed."""
    newer = [e.record for e in job.checkpoints() if _takes_its_place(job, e.record, old)]
    if not newer:
        yield "it was marked for deletion, and nothing newer is committed and undoubted"
    for name in dying:
        tier = old.tiers.get(name)
        there = any(name in r.tiers and r.tiers[name].state is TierState.PRESENT for r in newer)
        if tier is not None and tier.state is TierState.PRESENT and tier.shared and not there:
            yield f"it leaves {name}, and nothing newer is there"


def _takes_its_place(job: JobView, other: CheckpointRecord, old: CheckpointRecord) -> bool:
    """Return whether a restore may start from `other`, newer than `old` and without an open corruption report."""
    if other.attempt == old.attempt or other.state is not CheckpointState.COMMITTED:
        return False
    if other.type not in WHOLE or _reported_damaged(job, other):
        return False
    latest = job.latest()
    if latest is not None and latest.record.attempt == other.attempt:
        return (latest.record.generation, latest.record.step) > (old.generation, old.step) or _superseded(
            job, old
        )
    return (other.generation, other.step) > (old.generation, old.step) and not _superseded(job, other)


def _reported_damaged(job: JobView, record: CheckpointRecord) -> bool:
    """Return whether damage of the checkpoint, or of a checkpoint that it needs, was reported and not refuted."""
    needed = [record, *(e.record for e in job.checkpoints() if _refers(job, record, e.record))]
    return any(
        each.record.corrupt
        and not each.record.refuted_by
        and (record.generation, record.step) <= (each.record.found_generation, each.record.found_step)
        for owner in needed
        for name, tier in record.tiers.items()
        if tier.state is TierState.PRESENT
        for each in job.view.entries(
            job.keys.suspects(owner.step, owner.generation, owner.attempt, name), CorruptionReport
        )
    )


def _refers(job: JobView, user: CheckpointRecord, used: CheckpointRecord) -> bool:
    refs = job.keys.refs(used.step, used.generation, used.attempt)
    return job.view.get(refs + user.attempt) is not None


def _superseded(job: JobView, record: CheckpointRecord) -> bool:
    """Return whether a later world restored an earlier step, or began without a checkpoint."""
    later = [int(name) for name in job.view.names(job.keys.worlds) if int(name) > record.generation]
    points = [step for generation in later if (step := job.restored(generation)) is not None]
    return record.generation <= job.anew() or any(step < record.step for step in points)
