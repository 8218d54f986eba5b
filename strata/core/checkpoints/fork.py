"""Fork and rewind: begin a job from another job's checkpoint, or go back to an older checkpoint of the job.

A *fork* is a record in the new job that stands for the source's checkpoint. The fork's generation is 0, before
every world, and `latest` names the fork. So the first world begins from the fork by the ordinary rule. The bytes
stay in the source's folder; a reference under the source keeps them until the fork's record is deleted.

A *rewind* requests a new generation that begins from a chosen record (PROTOCOLS 8.4). Until the leader
has written that world nothing is saved: otherwise half the ranks could save the old history and half the new one,
and the checkpoint would belong to neither.
"""

from __future__ import annotations

import dataclasses

from strata.core.checkpoints.deletion import fork_reference
from strata.core.checkpoints.order import RESTORABLE_TYPES, find, newest, pending_rewind, restorations
from strata.core.checkpoints.pins import tagged
from strata.core.checkpoints.references import Reference, Rewind
from strata.core.checkpoints.tiers import tiers_of
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, Latest, Origin, TierState, encode
from strata.core.kv.txn import Decision, Put, Txn, absent, none_in, refusable, unchanged
from strata.core.kv.view import Entry
from strata.errors import (
    CheckpointNotFound,
    Conflict,
    InvalidArgument,
    Refused,
    StaleGeneration,
)

FORK_GENERATION = 0


def choose(
    job: JobView, *, step: int, attempt: str = "", tag: str = "", latest: bool = False
) -> Entry[CheckpointRecord]:
    """Return the committed checkpoint with whole state that the arguments name, or raise."""
    name = job.keys.name
    if latest:
        entry, what = newest(job), ""
    elif tag:
        entry, what = tagged(job, tag), f" tagged {tag}"
    else:
        entry, what = find_committed(job, step, attempt), f" of step {step}"
    if entry is None:
        raise CheckpointNotFound(f"job {name} has no committed checkpoint{what}")
    record = entry.record
    if record.state is not CheckpointState.COMMITTED:
        raise Refused(f"step {record.step} of job {name} is {record.state.value}")
    if record.type not in RESTORABLE_TYPES:
        raise Refused(
            f"step {record.step} of job {name} is {record.type.value}: a part of a state",
            hint="a job begins from a full or an incremental checkpoint",
        )
    return entry


def find_committed(job: JobView, step: int, attempt: str = "") -> Entry[CheckpointRecord] | None:
    """Return the record of `attempt`; without `attempt`, the step's newest committed record, or else its newest."""
    if attempt:
        return find(job, step, attempt)
    entries = list(job.view.entries(job.keys.checkpoint_step(step), CheckpointRecord))
    good = [e for e in entries if e.record.state is CheckpointState.COMMITTED]
    return max(good or entries, key=lambda e: e.record.generation, default=None)


# -- from another job -------------------------------------------------------------------------


@refusable
def decide_fork(
    target: JobView, source: JobView, *, step: int, attempt: str = "", tag: str = "", latest: bool = False
) -> Decision:
    """Let the job `target`, which has not begun, begin from a checkpoint of the job `source`. Both `JobView`s are
    from one view.

    Settled once `target` has that fork. `Refused`: `target` has a world or a checkpoint of its own. `Conflict`:
    `target` was forked from another checkpoint.
    """
    name = target.keys.name
    if target.keys.root == source.keys.root:
        raise InvalidArgument("a job cannot be forked from itself", hint="to go back within a job, rewind it")
    chosen = choose(source, step=step, attempt=attempt, tag=tag, latest=latest)
    record, origin = chosen.record, _forked_from(target)
    if origin is not None:
        here = f"step {origin.step} of job {origin.job}"
        if origin == Origin(job=source.keys.name, step=record.step, generation=record.generation):
            return Decision(reason=f"it begins from {here}")
        raise Conflict(f"it was forked already, from {here}", hint="delete the job, or take another name")
    if target.head() is not None or target.latest() is not None or target.view.names(target.keys.checkpoints):
        raise Refused(f"job {name} has begun already", hint="fork into a job of a new name")
    fork = dataclasses.replace(
        record,
        generation=FORK_GENERATION,
        base_step=None,
        base_attempt=None,
        reason="",
        tiers={n: t for n, t in tiers_of(record).items() if t.state is TierState.PRESENT},
        origin=Origin(job=source.keys.name, step=record.step, generation=record.generation),
    )
    first = Latest(
        generation=FORK_GENERATION,
        step=record.step,
        attempt=record.attempt,
        record_generation=FORK_GENERATION,
    )
    reference = Reference(step=record.step, generation=FORK_GENERATION, job=name)
    return Decision(
        reason=f"job {name} begins from step {record.step} of job {source.keys.name}",
        txn=Txn(
            compares=(
                unchanged(chosen.key, chosen.mod_revision),
                absent(target.keys.head),
                absent(target.keys.latest),
                none_in(target.keys.checkpoints),
            ),
            success=(
                Put(key=target.keys.checkpoint(record.step, FORK_GENERATION), value=encode(fork)),
                Put(key=target.keys.latest, value=encode(first)),
                Put(key=fork_reference(target, fork), value=encode(reference)),
            ),
        ),
    )


def _forked_from(job: JobView) -> Origin | None:
    """Return the origin of a job that was forked and has not changed since, or None."""
    records = [entry.record for entry in job.checkpoints()]
    return records[0].origin if job.head() is None and len(records) == 1 else None


def forks_of(job: JobView) -> list[str]:
    """Return the jobs that were forked from this one and still need its bytes."""
    found = set()
    for entry in job.checkpoints():
        record = entry.record
        refs = job.keys.refs(*record.where)
        found |= {name.removeprefix("fork:") for name in job.view.names(refs) if name.startswith("fork:")}
    return sorted(found)


# -- rewind -----------------------------------------------------------------------------------


@refusable
def decide_rewind(job: JobView, *, generation: int, step: int, attempt: str = "", who: str = "") -> Decision:
    """Make the generation after `generation`, the current one, begin from this checkpoint.

    Settled once the rewind is recorded, or was carried out. Later checkpoints stay, but are superseded:
    no later world begins from them. `StaleGeneration` if another world has begun meanwhile.
    """
    head = job.head()
    if head is None:
        raise Refused("the job has no world yet", hint="fork begins a new job from a checkpoint")
    current = head.record.generation
    if current != generation:
        begun = {g for g, s in restorations(job) if g > generation and s == step}
        if begun:
            return Decision(reason=f"generation {min(begun)} began from step {step}")
        raise StaleGeneration(f"the request is for generation {generation}; {current} is current")
    chosen = choose(job, step=step, attempt=attempt)
    record, rewind = chosen.record, pending_rewind(job)
    requested = Rewind(step=record.step, attempt=record.attempt, record_generation=record.generation, who=who)
    if rewind is not None and rewind.record == requested:
        return Decision(reason=f"the next generation begins from step {step}")
    return Decision(
        reason=f"{who or 'somebody'} rewinds the job to step {step}",
        txn=Txn(
            compares=(
                unchanged(head.key, head.mod_revision),
                unchanged(chosen.key, chosen.mod_revision),
                unchanged(job.keys.rewind, job.view.mod_revision(job.keys.rewind)),
            ),
            success=(Put(key=job.keys.rewind, value=encode(requested)),),
        ),
    )
