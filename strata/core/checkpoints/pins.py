"""Pins, tags and readers: they keep a checkpoint from being deleted (PROTOCOLS 8.5, 8.6).

A pin keeps a checkpoint until the pin is removed. A tag is a movable name, and keeps the checkpoint that it names.
A reader keeps the checkpoint that it reads as long as the reader's lease exists.

A pin, tag or reader is written in a transaction that compares the record. A deletion turns the record into a
tombstone in a transaction that compares that no pin, tag or reader exists. So only the first of the two
transactions succeeds.
"""

from __future__ import annotations

from strata.core.checkpoints.attempt import named
from strata.core.checkpoints.order import find
from strata.core.checkpoints.references import Reader, Tag
from strata.core.ids import checked_id
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, Pin, encode
from strata.core.kv.txn import Decision, Delete, Operation, Put, Txn, absent, refusable, unchanged
from strata.core.kv.view import Entry
from strata.errors import Conflict, QuotaExceeded, Refused

MAX_TAGS = 256
"""The maximum number of tags of one checkpoint, because every message about a checkpoint carries all its tags."""

_KEPT = frozenset({CheckpointState.COMMITTED, CheckpointState.CORRUPT})
_READ = frozenset({CheckpointState.COMMITTED, CheckpointState.CORRUPT, CheckpointState.PREPARED})


@refusable
def decide_pin(job: JobView, *, step: int, attempt: str, who: str, why: str) -> Decision:
    """Protect a checkpoint from deletion until it is unpinned. A checkpoint has at most one pin."""
    held = named(job, step, attempt)
    if held.record.state not in _KEPT:
        raise Refused(f"step {step} is {held.record.state.value} and cannot be pinned")
    key = job.keys.pin(step, held.record.attempt)
    pin = job.view.record(key, Pin)
    requested = Pin(who=who, why=why)
    if pin == requested:
        return Decision(reason=f"step {step} is pinned by {who}")
    if pin is not None:
        raise Conflict(f"step {step} is pinned already, by {pin.who}: {pin.why}")
    return Decision(
        reason=f"{who} pins step {step}",
        txn=Txn(
            compares=(unchanged(held.key, held.mod_revision), absent(key)),
            success=(Put(key=key, value=encode(requested)),),
        ),
    )


def decide_unpin(job: JobView, *, step: int, attempt: str) -> Decision:
    """End the protection of a checkpoint. Without a pin there is nothing to write."""
    key = job.keys.pin(step, attempt)
    revision = job.view.mod_revision(key)
    if not revision:
        return Decision(reason=f"step {step} is not pinned")
    return Decision(
        reason=f"step {step} is unpinned",
        txn=Txn(compares=(unchanged(key, revision),), success=(Delete(key=key),)),
    )


# -- tags -------------------------------------------------------------------------------------


def tagged(job: JobView, tag: str) -> Entry[CheckpointRecord] | None:
    """Return the record that a tag names, or None."""
    named = job.view.record(job.keys.tag(tag), Tag)
    if named is None:
        return None
    entry = job.checkpoint(named.step, named.generation)
    return entry if entry is not None and entry.record.attempt == named.attempt else None


def tags_of(job: JobView, record: CheckpointRecord) -> list[str]:
    """Return the tags of a checkpoint."""
    return job.view.names(job.keys.tags_of(*record.where))


@refusable
def decide_tag(job: JobView, *, tag: str, step: int, attempt: str, who: str) -> Decision:
    """Make `tag` name this checkpoint, and no other.

    The tag is stored twice. With the key under its name, a compare ensures that the tag names one checkpoint at a
    time. With the key under the attempt, a deletion finds the tag by one range.
    """
    held = named(job, step, attempt)
    record, key = held.record, job.keys.tag(tag)
    if record.state not in _KEPT:
        raise Refused(f"step {step} is {record.state.value} and cannot be tagged")
    before = job.view.entry(key, Tag)
    if len(tags := tags_of(job, record)) >= MAX_TAGS and tag not in tags:
        why = f"step {step} has {len(tags)} tags, the limit"
        raise QuotaExceeded(why, hint="remove one: strata checkpoints untag")
    requested = Tag(step=step, generation=record.generation, attempt=record.attempt, who=who)
    if before is not None and before.record.where == requested.where:
        return Decision(reason=f"{tag} names step {step}")
    operations: list[Operation] = [
        Put(key=key, value=encode(requested)),
        Put(key=job.keys.tags_of(*record.where) + tag, value=encode(requested)),
    ]
    if before is not None:
        operations.append(Delete(key=job.keys.tags_of(*before.record.where) + tag))
    return Decision(
        reason=f"{who or 'somebody'} tags step {step} as {tag}",
        txn=Txn(
            compares=(
                unchanged(held.key, held.mod_revision),
                unchanged(key, before.mod_revision if before is not None else 0),
            ),
            success=tuple(operations),
        ),
    )


@refusable
def decide_untag(job: JobView, *, tag: str, step: int = 0, attempt: str = "") -> Decision:
    """Remove a tag; settled if it does not exist.

    `Conflict` if the tag names another attempt than a given `attempt`.
    """
    before = job.view.entry(job.keys.tag(tag), Tag)
    if before is None:
        return Decision(reason=f"nothing is tagged {tag}")
    named = before.record
    if attempt and (named.step, named.attempt) != (step, attempt):
        why = f"{tag} names step {named.step} (attempt {named.attempt}), not attempt {attempt} of step {step}"
        raise Conflict(why)
    return Decision(
        reason=f"step {named.step} is not {tag} any more",
        txn=Txn(
            compares=(unchanged(before.key, before.mod_revision),),
            success=(Delete(key=before.key), Delete(key=job.keys.tags_of(*named.where) + tag)),
        ),
    )


# -- readers ----------------------------------------------------------------------------------


@refusable
def decide_open(job: JobView, *, step: int, attempt: str, reader: str, who: str, lease: int) -> Decision:
    """Register a reader on `lease`: while the lease lives, the bytes stay. Settled once the key has that lease.

    `Refused` for a checkpoint that is open, aborted, or in deletion.
    """
    held = named(job, step, attempt)
    record = held.record
    key = job.keys.reader(*record.where, checked_id("reader", reader))
    known = job.view.get(key)
    if known is not None and known.lease == lease:
        return Decision(reason=f"{who or reader} reads step {step}")
    if record.state not in _READ:
        raise Refused(f"step {step} is {record.state.value} and cannot be read")
    return Decision(
        reason=f"{who or reader} begins to read step {step}",
        txn=Txn(
            compares=(
                unchanged(held.key, held.mod_revision),
                unchanged(key, known.mod_revision if known is not None else 0),
            ),
            success=(Put(key=key, value=encode(Reader(who=who)), lease=lease),),
        ),
    )


def reader_lease(job: JobView, *, step: int, attempt: str, reader: str) -> int:
    """Return the lease of a reader's key; 0 if there is no such reader."""
    held = find(job, step, attempt)
    if held is None:
        return 0
    known = job.view.get(job.keys.reader(*held.record.where, reader))
    return known.lease if known is not None else 0


def decide_close_reader(job: JobView, *, step: int, attempt: str, reader: str) -> Decision:
    """Delete a reader's key; settled if there is none."""
    held = find(job, step, attempt)
    if held is not None:
        key = job.keys.reader(*held.record.where, reader)
        revision = job.view.mod_revision(key)
        if revision:
            txn = Txn(compares=(unchanged(key, revision),), success=(Delete(key=key),))
            return Decision(reason=f"{reader} has read step {step}", txn=txn)
    return Decision(reason=f"{reader} does not read step {step}")
