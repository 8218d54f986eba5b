"""Deletion of a checkpoint, or of one copy of it (PROTOCOLS 8.5, 8.6, 8.7).

A deletion has three steps:
1. A transaction turns the record, or one of its tiers, into a tombstone (DELETING). The transaction compares that
   nothing needs the bytes any more.
2. A host removes the bytes. The host may be arbitrarily late, because the attempt's folder is unique and never
   reused, and a REMOVED tier stays REMOVED.
3. A second transaction removes the tombstone.

The record is deleted with its last tier. A fork has no bytes of its own: its record is deleted without a tombstone,
together with the reference that kept its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from strata.core.checkpoints.attempt import bases, named, release_references
from strata.core.checkpoints.corruption import is_whole
from strata.core.checkpoints.order import (
    RESTORABLE_TYPES,
    counts,
    find,
    is_latest,
    order,
    pending_rewind,
    superseded,
)
from strata.core.checkpoints.pins import tags_of
from strata.core.checkpoints.references import Copy, Discarded
from strata.core.checkpoints.tiers import hosts_of, present_on, tiers_of
from strata.core.ids import checked_id
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, Tier, TierState, encode
from strata.core.kv.txn import (
    Compare,
    Decision,
    Delete,
    Operation,
    Put,
    Txn,
    absent,
    delete_prefix,
    none_in,
    none_newer_in,
    refusable,
    unchanged,
)
from strata.core.kv.view import Entry
from strata.errors import InvalidArgument, Refused

_REMOVING = frozenset({TierState.DELETING, TierState.REMOVED})


@refusable
def decide_delete(
    job: JobView, *, step: int, attempt: str, finished: bool, tier: str = "", host: str = ""
) -> Decision:
    """Mark an attempt, or its copy on `tier`, as DELETING; with `finished`, delete the marked attempt or copy.

    `finished`: the bytes are removed. `host`: the host that has removed its part, if the tier spans several hosts'
    disks. A call without `finished` is settled once there is a tombstone. A call with `finished` is settled once
    the record, the copy or the host's part is removed.
    """
    if not attempt:
        raise InvalidArgument("a deletion must name the attempt")
    checked_id("attempt", attempt)
    if finished and find(job, step, attempt) is None:
        return _forget(job, step, attempt, tier)
    held = named(job, step, attempt)
    record, tiers = held.record, tiers_of(held.record)
    if tier and tier not in tiers:
        raise InvalidArgument(f"step {step} has no copy on {tier}", hint=f"there is {', '.join(tiers)}")
    if finished:
        return _finish(job, held, tier, host)
    if record.state is CheckpointState.DELETING or (tier and tiers[tier].state in _REMOVING):
        return Decision(reason=f"step {step} may be removed")
    return decide_tombstone(job, held, tier=tier)


# -- the tombstone ----------------------------------------------------------------------------


@refusable
def decide_tombstone(job: JobView, held: Entry[CheckpointRecord], *, tier: str = "") -> Decision:
    """Turn a checkpoint, or one copy, into a tombstone, or raise if something needs it."""
    record = held.record
    if tier and (record.state is not CheckpointState.COMMITTED or present_on(record) == [tier]):
        tier = ""  # the last copy: the record is deleted with its last tier
    guards = _unneeded(job, held)
    newer = _newer_commit(job, record, tier)
    if record.origin is not None:
        return _remove(job, held, guards=(*guards, *_as_they_are(job, newer)))
    tiers = {
        name: dataclasses.replace(each, state=TierState.DELETING)
        if each.state is not TierState.REMOVED and (not tier or name == tier)
        else each
        for name, each in tiers_of(record).items()
    }
    state = record.state if tier else CheckpointState.DELETING
    if not tier:
        tiers |= _half_copied(job, record)
    tombstone = dataclasses.replace(record, state=state, tiers=tiers)
    return Decision(
        reason=f"step {record.step}{f' on {tier}' if tier else ''} is to be deleted",
        txn=Txn(
            compares=(*guards, *_as_they_are(job, newer)),
            success=(Put(key=held.key, value=encode(tombstone)),),
        ),
    )


def _unneeded(job: JobView, held: Entry[CheckpointRecord]) -> tuple[Compare, ...]:
    """Return the compares under which this record's bytes may be removed; raise if something needs the bytes."""
    record, keys = held.record, job.keys
    if record.state is CheckpointState.OPEN:
        raise Refused(f"step {record.step} is being saved", hint="abort it first")
    rewind = pending_rewind(job)
    if is_latest(job, record):
        raise Refused(f"step {record.step} is the latest checkpoint")
    if rewind is not None and rewind.record.attempt == record.attempt:
        raise Refused(f"the job goes back to step {record.step}")
    pin, refs, readers = (
        keys.pin(record.step, record.attempt),
        keys.refs(*record.where),
        keys.readers(*record.where),
    )
    if job.view.get(pin) is not None:
        raise Refused(f"step {record.step} is pinned", hint="unpin it first")
    if names := tags_of(job, record):
        raise Refused(f"step {record.step} is tagged {names[0]}", hint="remove the tag first")
    if users := job.view.names(refs):
        raise Refused(f"step {record.step} is referenced by attempt {users[0]}")
    if users := job.view.names(readers):
        raise Refused(f"step {record.step} is being read by {users[0]}")
    return (
        unchanged(held.key, held.mod_revision),
        unchanged(keys.latest, job.view.mod_revision(keys.latest)),
        unchanged(keys.rewind, job.view.mod_revision(keys.rewind)),
        absent(pin),
        none_in(keys.tags_of(*record.where)),
        none_in(refs),
        none_in(readers),
    )


def _newer_commit(job: JobView, record: CheckpointRecord, tier: str) -> Sequence[Entry[CheckpointRecord]]:
    """Return the newer commits that must stay unchanged for this record to be deleted; raise if one is missing.

    At least one newer commit is required, and each shared tier that loses this checkpoint must have a newer commit.
    So a copy that survives the loss of a host is removed only if a newer copy survives it too. An ABORTED record is
    no restore point and needs no newer commit.
    """
    if record.state is CheckpointState.ABORTED:
        return ()
    newer = [e for e in job.checkpoints() if _newer(job, e.record, record)]
    if not newer:
        raise Refused(f"no newer checkpoint than step {record.step} is committed")
    newest = max(newer, key=lambda e: counts(job, e.record))
    kept = {newest.key: newest}
    for name, each in tiers_of(record).items():
        if not each.shared or each.state is not TierState.PRESENT or (tier and name != tier):
            continue
        there = [e for e in newer if name in present_on(e.record)]
        if not there:
            raise Refused(f"no newer checkpoint than step {record.step} is on {name}")
        safe = max(there, key=lambda e: counts(job, e.record))
        kept[safe.key] = safe
    return tuple(kept.values())


def _as_they_are(job: JobView, entries: Iterable[Entry[CheckpointRecord]]) -> list[Compare]:
    """Return compares that fail if one of these records changes, or gets a damage report on itself or a base."""
    stay = {entry.key: entry for entry in entries}
    needed = {key: entry.record for key, entry in stay.items()}
    needed |= {base.key: base.record for entry in stay.values() for base in bases(job, entry.record)}
    return [
        *(unchanged(entry.key, entry.mod_revision) for entry in stay.values()),
        *(
            none_newer_in(f"{job.keys.attempt(*r.where)}suspects/", job.view.revision)
            for r in needed.values()
        ),
    ]


def _newer(job: JobView, one: CheckpointRecord, than: CheckpointRecord) -> bool:
    """Return whether `one` counts as newer than `than`, and can be restored in its place."""
    if one.state is not CheckpointState.COMMITTED or one.type not in RESTORABLE_TYPES or not present_on(one):
        return False
    if one.attempt == than.attempt or not is_whole(job, one):
        return False
    if superseded(job, one):
        return False
    return counts(job, one) > order(than) or (is_latest(job, one) and superseded(job, than))


def _half_copied(job: JobView, record: CheckpointRecord) -> dict[str, Tier]:
    """Return the tiers with a begun copy that the record does not list yet; their bytes must be removed too."""
    found = {}
    for name in job.view.names(f"{job.keys.attempt(*record.where)}copies/"):
        copies = list(job.view.entries(job.keys.copies(*record.where, name), Copy))
        if name not in tiers_of(record) and copies:
            first = copies[0].record
            found[name] = Tier(path=first.path, shared=first.shared, state=TierState.DELETING)
    return found


# -- finishing --------------------------------------------------------------------------------


def _finish(job: JobView, held: Entry[CheckpointRecord], tier: str, host: str) -> Decision:
    record, tiers = held.record, dict(tiers_of(held.record))
    dying = dying_tiers(record)
    if tier and tiers[tier].state is TierState.REMOVED:
        return Decision(reason=f"step {record.step} is deleted from {tier}")
    if record.state is not CheckpointState.DELETING and tier not in dying:
        raise Refused(
            f"step {record.step} is {record.state.value}, not deleting",
            hint="request its deletion first, then remove its bytes",
        )
    if not tier:
        return _remove(job, held)
    if waiting := _other_hosts(job, record, tier, host):
        key = job.keys.removed(*record.where, tier) + checked_id("host", host)
        if job.view.get(key) is not None:
            return Decision(
                reason=f"{tier} of step {record.step} is still on {', '.join(sorted(waiting)[:4])}"
            )
        return Decision(
            reason=f"step {record.step} is deleted from the {tier} of {host}",
            txn=Txn(
                compares=(unchanged(held.key, held.mod_revision), absent(key)),
                success=(Put(key=key, value=encode(tiers[tier])),),
            ),
        )
    if record.state is CheckpointState.DELETING and dying == [tier]:
        return _remove(job, held)
    tiers[tier] = dataclasses.replace(tiers[tier], state=TierState.REMOVED)
    return Decision(
        reason=f"the bytes of step {record.step} are deleted from {tier}",
        txn=Txn(
            compares=(unchanged(held.key, held.mod_revision),),
            success=(
                Put(key=held.key, value=encode(dataclasses.replace(record, tiers=tiers))),
                delete_prefix(job.keys.copies(*record.where, tier)),
                delete_prefix(job.keys.removed(*record.where, tier)),
                delete_prefix(job.keys.suspects(*record.where, tier)),
            ),
        ),
    )


def dying_tiers(record: CheckpointRecord) -> list[str]:
    """Return the tiers whose bytes must be removed: for a tombstone, all tiers that are left."""
    return [name for name, tier in tiers_of(record).items() if tier.state is TierState.DELETING]


def _other_hosts(job: JobView, record: CheckpointRecord, tier: str, host: str) -> set[str]:
    """Return the hosts that still hold a part of this tier once `host` has removed its own.

    Without a `host`, the call states that all hosts have removed theirs; an operator sends such a call for a lost
    machine.
    """
    if not host:
        return set()
    done = job.view.names(job.keys.removed(*record.where, tier))
    return hosts_of(job, record, tier) - {host, *done}


def _remove(job: JobView, held: Entry[CheckpointRecord], guards: tuple[Compare, ...] = ()) -> Decision:
    """Delete the record and its keys. Readers and references need no compare: a tombstone gets no new ones."""
    record, keys = held.record, job.keys
    operations: list[Operation] = [
        Delete(key=held.key),
        delete_prefix(keys.attempt(*record.where)),
        *release_references(job, record),
    ]
    what = "bytes"
    if record.origin is not None:
        operations.append(Delete(key=fork_reference(job, record)))
        what = "fork"
    return Decision(
        reason=f"step {record.step}: its {what} and its record are deleted",
        txn=Txn(
            compares=guards or (unchanged(held.key, held.mod_revision),),
            success=tuple(operations),
        ),
    )


def fork_reference(job: JobView, record: CheckpointRecord) -> str:
    """Return the key of a fork's reference to its source; the key's name cannot be that of an attempt or a job."""
    assert record.origin is not None
    source = f"{job.keys.folder}{record.origin.job}/"
    keys = dataclasses.replace(job.keys, root=source)
    refs = keys.refs(record.origin.step, record.origin.generation, record.attempt)
    return f"{refs}fork:{job.keys.name}"


def _forget(job: JobView, step: int, attempt: str, tier: str) -> Decision:
    """Delete the note that bytes of an attempt, whose slot another attempt took, must be removed."""
    note = job.view.entry(job.keys.discard(attempt), Discarded)
    if note is None:
        return Decision(reason=f"attempt {attempt} of step {step} is deleted")
    left = {name: each for name, each in note.record.tiers.items() if tier and name != tier}
    after = dataclasses.replace(note.record, tiers=left)
    operation = Put(key=note.key, value=encode(after)) if left else Delete(key=note.key)
    return Decision(
        reason=f"the bytes of attempt {attempt} of step {step} are deleted",
        txn=Txn(compares=(unchanged(note.key, note.mod_revision),), success=(operation,)),
    )
