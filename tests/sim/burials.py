"""What must not have been when a checkpoint, or a copy of one, was marked for deletion (PROTOCOLS 8.5 to 8.7).

Judged from the keyspace as it was at that revision, and not by the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator

from strata.core.job import JobView
from strata.core.keys import JobKeys
from strata.core.records import CheckpointRecord, CheckpointState, CheckpointType, Tier, TierState
from strata.core.view import View

GOING = {TierState.DELETING, TierState.REMOVED}
WHOLE = {CheckpointType.FULL, CheckpointType.INCREMENTAL}

AFTER_THE_COMMIT = {
    (CheckpointState.COMMITTED, CheckpointState.COMMITTED),
    (CheckpointState.COMMITTED, CheckpointState.DELETING),
    (CheckpointState.COMMITTED, CheckpointState.CORRUPT),
    (CheckpointState.CORRUPT, CheckpointState.DELETING),
    (CheckpointState.ABORTED, CheckpointState.DELETING),
    (CheckpointState.DELETING, CheckpointState.DELETING),
}
"""What becomes of records where somebody keeps them."""


def burial_problems(
    view: View, keys: JobKeys, old: CheckpointRecord | None, new: CheckpointRecord
) -> Iterator[str]:
    """Yield what is wrong with a record's change from `old` to `new`, as of the revision of that change."""
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
    """An Incremental's base is committed at its begin, and kept by a reference, with all that it uses."""
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
            gone = [n for n in new.tiers if n not in record.tiers or record.tiers[n].state in GOING]
            if gone:
                yield f"it builds on step {record.step}, which is not on {gone} any more"


def _newer(job: JobView, old: CheckpointRecord, dying: list[str]) -> Iterator[str]:
    """Something that can be restored in its place is there, on each shared tier that it leaves."""
    others = [
        e.record
        for e in job.checkpoints()
        if e.record.state is CheckpointState.COMMITTED
        and e.record.type in WHOLE
        and e.record.attempt != old.attempt
    ]
    if not others:
        yield "it was marked for deletion, and no other is committed"
    for name in dying:
        tier = old.tiers.get(name)
        there = any(name in r.tiers and r.tiers[name].state is TierState.PRESENT for r in others)
        if tier is not None and tier.state is TierState.PRESENT and tier.shared and not there:
            yield f"it leaves {name}, and no other is there"
