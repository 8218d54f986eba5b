"""One attempt at a save: its state in the view, which callers may write to it, and its abort."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from strata.core.checkpoints.order import find
from strata.core.ids import WorkerId
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, Seal, encode
from strata.core.kv.txn import Compare, Decision, Delete, Put, Txn, created_at, delete_prefix, unchanged
from strata.core.kv.view import Entry
from strata.errors import (
    CheckpointAborted,
    CheckpointNotFound,
    Refused,
    StaleGeneration,
    StaleIncarnation,
)

MAX_REFERENCES = 32
"""The maximum number of attempts that an Incremental may use; after that a Full is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """The caller of a request: one rank of a member, in the generation that the rank believes to be the current one."""

    worker: WorkerId
    incarnation: int
    generation: int
    rank: int


# -- the view of one record -------------------------------------------------------------------


def acked(job: JobView, record: CheckpointRecord) -> set[int]:
    """Return the ranks whose part of this attempt is durable."""
    acks = job.keys.acks(*record.where)
    return {int(name) for name in job.view.names(acks) if name != "seal"}


def sealed(job: JobView, record: CheckpointRecord) -> Seal | None:
    """Return the seal of this attempt, or None."""
    return job.view.record(job.keys.seal(*record.where), Seal)


def missing(job: JobView, record: CheckpointRecord) -> list[int]:
    """Return the ranks that have not acked this attempt, in order."""
    return sorted(set(range(record.ranks)) - acked(job, record))


def complete(job: JobView, record: CheckpointRecord) -> bool:
    """Return whether all ranks have acked and the seal exists."""
    return sealed(job, record) is not None and not missing(job, record)


def uses(job: JobView, user: CheckpointRecord, used: CheckpointRecord) -> bool:
    """Return whether the attempt `user` holds a reference to `used`."""
    refs = job.keys.refs(*used.where)
    return job.view.get(refs + user.attempt) is not None


def bases(job: JobView, record: CheckpointRecord) -> Iterator[Entry[CheckpointRecord]]:
    """Yield the records that a record refers to, without a scan of the catalog, because every rank's report calls
    this function.

    A record refers to its base, and to all records that the base referred to when the record was begun. So
    following the bases finds all records.
    """
    user = record
    for _ in range(MAX_REFERENCES):
        if user.base_step is None or user.base_attempt is None:
            return
        base = find(job, user.base_step, user.base_attempt)
        if base is None or not uses(job, record, base.record):
            return
        yield base
        user = base.record


def attempt_of(job: JobView, generation: int, step: int, attempt: str) -> Entry[CheckpointRecord]:
    """Return the slot's record; raise if there is none or the slot holds another attempt."""
    held = job.checkpoint(step, generation)
    if held is None:
        raise CheckpointNotFound(f"no save of step {step} was begun in generation {generation}")
    if held.record.attempt != attempt:
        raise CheckpointAborted(
            f"attempt {attempt} of step {step} was given up; {held.record.attempt} took its place"
        )
    return held


def named(job: JobView, step: int, attempt: str) -> Entry[CheckpointRecord]:
    """Return the record that a request names, or raise `CheckpointNotFound`."""
    held = find(job, step, attempt) if attempt else None
    if held is None:
        raise CheckpointNotFound(f"no attempt {attempt or '(unnamed)'} of step {step} exists")
    return held


# -- authorisation ----------------------------------------------------------------------------


def authorised(job: JobView, author: Author) -> tuple[Compare, ...]:
    """Return the compares for a write on the author's behalf; raise if the author may not write."""
    head, world = job.head(), job.world()
    if head is None or world is None:
        raise Refused("the job has no world yet", hint="wait until the world has formed")
    current = head.record.generation
    if author.generation < current:
        raise StaleGeneration(f"generation {author.generation} has ended; {current} is current")
    if author.generation > current:
        raise Refused(f"generation {author.generation} does not exist yet; {current} is current")
    member = world.find(author.worker, author.incarnation)
    if member is None:
        if world.holder(author.worker) is not None:
            raise StaleIncarnation(f"{author.worker} is another incarnation in this world")
        raise Refused(f"{author.worker} has no place in generation {current}")
    if not member.first_rank <= author.rank < member.first_rank + member.slots:
        raise Refused(f"rank {author.rank} does not belong to {author.worker}")
    key = job.keys.worker(author.worker)
    worker = job.worker(author.worker)
    if worker is None:
        raise StaleIncarnation(f"{author.worker} was declared dead", hint="it must register again")
    if worker.create_revision != author.incarnation:
        raise StaleIncarnation(f"another process took the place of {author.worker}")
    return unchanged(head.key, head.mod_revision), created_at(key, author.incarnation)


# -- abort ------------------------------------------------------------------------------------


def release_references(job: JobView, record: CheckpointRecord) -> tuple[Delete, ...]:
    """Return the deletes that release this attempt's references to the checkpoints it builds on."""
    return tuple(
        Delete(key=job.keys.refs(*e.record.where) + record.attempt)
        for e in job.checkpoints()
        if uses(job, record, e.record)
    )


def abort_attempt(
    job: JobView, held: Entry[CheckpointRecord], reason: str, guards: tuple[Compare, ...]
) -> Decision:
    """Set the record to ABORTED and delete its acks; no ack can follow, because an ack compares the record.

    On a tier that is not shared the acks stay: they record which hosts' disks hold the attempt's parts.
    """
    record = dataclasses.replace(held.record, state=CheckpointState.ABORTED, reason=reason)
    forgotten = [delete_prefix(job.keys.acks(*record.where))]
    if not all(tier.shared for tier in record.tiers.values()):
        forgotten = []
    return Decision(
        reason=f"step {record.step} is given up: {reason}",
        txn=Txn(
            compares=(*guards, unchanged(held.key, held.mod_revision)),
            success=(
                Put(key=held.key, value=encode(record)),
                *release_references(job, record),
                *forgotten,
            ),
        ),
    )
