"""Pins and deletion: how a checkpoint leaves the catalog (PROTOCOLS 8.5, 8.6).

A deletion is two transactions with the removal of the bytes between them. The first turns the
record into a tombstone (DELETING) and compares everything that could still need the bytes; the
second removes the record. Whoever removes the bytes in between is right however late: the
attempt's folder is unique and never used again.
"""

from __future__ import annotations

import dataclasses

from strata.core.checkpoint_attempt import refuse, release_references
from strata.core.checkpoint_order import find, is_latest, order, superseded
from strata.core.ids import checked_id
from strata.core.job import JobView
from strata.core.records import CheckpointRecord, CheckpointState, Pin, encode
from strata.core.txn import (
    Compare,
    Decision,
    Delete,
    Put,
    Txn,
    absent,
    delete_prefix,
    none_in,
    unchanged,
)
from strata.core.view import Entry
from strata.errors import CheckpointNotFound, Conflict, InvalidArgument, Refused, StrataError

_PINNABLE = frozenset({CheckpointState.COMMITTED, CheckpointState.CORRUPT})


def decide_pin(job: JobView, *, step: int, attempt: str, who: str, why: str) -> Decision:
    """Protect a checkpoint from deletion until it is unpinned. One pin a checkpoint."""
    held = find(job, step, attempt) if attempt else None
    if held is None:
        return refuse(_not_found(step, attempt))
    if held.record.state not in _PINNABLE:
        return refuse(Refused(f"step {step} is {held.record.state.value} and cannot be pinned"))
    key = job.keys.pin(step, held.record.attempt)
    pin = job.view.record(key, Pin)
    wanted = Pin(who=who, why=why)
    if pin == wanted:
        return Decision(reason=f"step {step} is pinned by {who}")
    if pin is not None:
        return refuse(Conflict(f"step {step} is pinned already, by {pin.who}: {pin.why}"))
    return Decision(
        reason=f"{who} pins step {step}",
        txn=Txn(
            compares=(unchanged(held.key, held.mod_revision), absent(key)),
            success=(Put(key=key, value=encode(wanted)),),
        ),
    )


def decide_unpin(job: JobView, *, step: int, attempt: str) -> Decision:
    """End the protection of a checkpoint; settled when there is none."""
    key = job.keys.pin(step, attempt)
    revision = job.view.mod_revision(key)
    if not revision:
        return Decision(reason=f"step {step} is not pinned")
    return Decision(
        reason=f"step {step} is unpinned",
        txn=Txn(compares=(unchanged(key, revision),), success=(Delete(key=key),)),
    )


def decide_delete(job: JobView, *, step: int, attempt: str, finished: bool) -> Decision:
    """Mark an attempt as DELETING; when its bytes are removed (`finished`), remove the record.

    Settled, for the first call, once the record is a tombstone; for the second, once it is gone.
    """
    if not attempt:
        return refuse(InvalidArgument("a deletion names the attempt it means"))
    checked_id("attempt", attempt)
    held = find(job, step, attempt)
    if held is None:
        if finished:
            return Decision(reason=f"attempt {attempt} of step {step} is gone")
        return refuse(_not_found(step, attempt))
    if held.record.state is CheckpointState.DELETING:
        return _remove(job, held) if finished else Decision(reason=f"step {step} may be removed")
    if finished:
        return refuse(
            Refused(
                f"step {step} is {held.record.state.value}, not deleting",
                hint="ask for its deletion first, then remove its bytes",
            )
        )
    return _entomb(job, held)


def _entomb(job: JobView, held: Entry[CheckpointRecord]) -> Decision:
    record, keys = held.record, job.keys
    if record.state is CheckpointState.OPEN:
        return refuse(Refused(f"step {record.step} is being saved", hint="abort it first"))
    latest = job.latest()
    if is_latest(latest.record if latest is not None else None, record):
        return refuse(Refused(f"step {record.step} is the latest checkpoint"))
    pin = keys.pin(record.step, record.attempt)
    refs = keys.refs(record.step, record.generation, record.attempt)
    readers = keys.readers(record.step, record.generation, record.attempt)
    if job.view.get(pin) is not None:
        return refuse(Refused(f"step {record.step} is pinned", hint="unpin it first"))
    if job.view.get(keys.importing) is not None:
        return refuse(Refused("a reconciliation is in progress: nothing is deleted"))
    if users := job.view.names(refs):
        return refuse(Refused(f"step {record.step} is referenced by attempt {users[0]}"))
    if users := job.view.names(readers):
        return refuse(Refused(f"step {record.step} is being read by {users[0]}"))
    newer = _newer_commit(job, record)
    if isinstance(newer, StrataError):
        return refuse(newer)
    tombstone = dataclasses.replace(record, state=CheckpointState.DELETING)
    return Decision(
        reason=f"step {record.step} is to be deleted",
        txn=Txn(
            compares=(
                unchanged(held.key, held.mod_revision),
                unchanged(keys.latest, latest.mod_revision if latest is not None else 0),
                absent(pin),
                absent(keys.importing),
                none_in(refs),
                none_in(readers),
                *newer,
            ),
            success=(Put(key=held.key, value=encode(tombstone)),),
        ),
    )


def _newer_commit(job: JobView, record: CheckpointRecord) -> tuple[Compare, ...] | StrataError:
    """Return the compare that keeps a newer commit in place while this one goes.

    An ABORTED one is no restore point and needs none.
    """
    if record.state is CheckpointState.ABORTED:
        return ()
    latest = job.latest()
    if latest is not None:
        named = job.checkpoint(latest.record.step, latest.record.record_generation)
        counts = (latest.record.generation, latest.record.step)
        if (
            named is not None
            and named.record.state is CheckpointState.COMMITTED
            and (counts > order(record) or superseded(job, record))
        ):
            return (unchanged(named.key, named.mod_revision),)
    return Refused(f"no newer checkpoint than step {record.step} is committed")


def _remove(job: JobView, held: Entry[CheckpointRecord]) -> Decision:
    """No new reader or reference can appear: they refuse a tombstone, so none is compared."""
    record, keys = held.record, job.keys
    return Decision(
        reason=f"the bytes of step {record.step} are gone, and so goes its record",
        txn=Txn(
            compares=(unchanged(held.key, held.mod_revision),),
            success=(
                Delete(key=held.key),
                delete_prefix(keys.attempt(record.step, record.generation, record.attempt)),
                *release_references(job, record),
            ),
        ),
    )


def _not_found(step: int, attempt: str) -> StrataError:
    return CheckpointNotFound(f"no attempt {attempt or '(unnamed)'} of step {step} exists")
