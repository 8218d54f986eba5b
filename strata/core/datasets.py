"""Datasets and whose shards are whose (PROTOCOLS 7.1).

The assignment names the members, the ring and the shards moved on it; the owners follow from them
(`core.ring`), so the record stays small. It changes when the members of the world do, and only then: a new generation
of the same members moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.core.ids import checked_id
from strata.core.job import JobView
from strata.core.keys import ClusterKeys
from strata.core.records import Assignment, DatasetSpec, Phase, encode
from strata.core.ring import RING, assign, owners
from strata.core.txn import Decision, Put, Txn, absent, created_at, unchanged
from strata.errors import Conflict, InvalidArgument, QuotaExceeded

MAX_SHARDS = 100_000
"""Dividing so many for the first time takes a leader about a third of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentPlan:
    """What to write, a transaction a dataset, each of which may fail for itself."""

    reason: str
    txns: tuple[Txn, ...] = ()


def decide_register_dataset(job: JobView, name: str, spec: DatasetSpec) -> Decision:
    """Create a dataset. The same spec again is fine; another one is refused as a `Conflict`."""
    checked_id("dataset", name)
    if not 1 <= spec.shards <= MAX_SHARDS:
        raise InvalidArgument(f"{spec.shards} shards: a dataset has 1 to {MAX_SHARDS}")
    key = job.keys.dataset_spec(name)
    there = job.view.record(key, DatasetSpec)
    if there == spec:
        return Decision(reason=f"dataset {name} is registered")
    if there is not None:
        why = f"dataset {name} of job {job.keys.name} is registered with another spec"
        return Decision(reason=why, refusal=Conflict(why, hint="register the new one under a new name"))
    return Decision(
        reason=f"dataset {name} is registered with {spec.shards} shards",
        txn=Txn(compares=(absent(key),), success=(Put(key=key, value=encode(spec)),)),
    )


def owners_of(assignment: Assignment) -> list[str]:
    """Return the worker that owns each shard."""
    return owners(assignment.workers, assignment.shards, assignment.moved)


def shards_of(assignment: Assignment) -> dict[str, list[int]]:
    """Return the shards of each worker, in order; a worker may own none."""
    found: dict[str, list[int]] = {worker: [] for worker in assignment.workers}
    for shard, worker in enumerate(owners_of(assignment)):
        found[worker].append(shard)
    return found


def plan_assignment(job: JobView, *, keys: ClusterKeys, epoch: int) -> AssignmentPlan:
    """Say what the leader of `epoch` writes so that every dataset is divided among the world."""
    world = job.world()
    if world is None or world.head.forming or job.phase() is not Phase.RUNNING:
        return AssignmentPlan(reason=f"job {job.keys.name} has no world to divide datasets among")
    workers = tuple(sorted(member.worker for member in world.members))
    view = job.view
    txns, reasons = [], []
    for name in view.names(job.keys.datasets):
        spec = view.entry(job.keys.dataset_spec(name), DatasetSpec)
        if spec is None:
            continue
        key = job.keys.assignment(name)
        old = view.entry(key, Assignment)
        if old and (old.record.workers, old.record.shards) == (workers, spec.record.shards):
            continue
        before = owners_of(old.record) if old is not None else None
        moved = assign(workers, spec.record.shards, before)
        record = Assignment(
            assign_epoch=old.record.assign_epoch + 1 if old is not None else 1,
            epoch=epoch,
            generation=world.head.generation,
            shards=spec.record.shards,
            workers=workers,
            ring=RING,
            moved={worker: tuple(taken) for worker, taken in moved.items()},
        )
        try:
            value = encode(record)
        except QuotaExceeded as error:
            reasons.append(f"{name} cannot be assigned: {error.message}")
            continue
        compares = (
            created_at(keys.leader, epoch),
            unchanged(job.keys.head, view.mod_revision(job.keys.head)),
            unchanged(job.keys.phase, view.mod_revision(job.keys.phase)),
            unchanged(spec.key, spec.mod_revision),
            unchanged(key, old.mod_revision if old is not None else 0),
        )
        txns.append(Txn(compares=compares, success=(Put(key=key, value=value),)))
        reasons.append(f"{name} is divided among {len(workers)} members")
    reason = "; ".join(reasons) or f"all datasets of job {job.keys.name} are assigned"
    return AssignmentPlan(reason=reason, txns=tuple(txns))
