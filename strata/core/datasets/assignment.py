"""Datasets, and the assignment of their shards to members (PROTOCOLS 7.1).

The assignment names the members, the ring and the exceptions to the ring. The owners follow from these
(`core.datasets.ring`), so the record stays small. A *seat* is the name under which a member is placed on the ring.
If one member leaves and another joins, the new member takes over the seat with all its shards, and no other shard
moves. The assignment changes only with the members of the world: a new generation of the same members moves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, count

from strata.core.datasets.ring import RING, Moved, assign, owners
from strata.core.ids import WorkerId, checked_id
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Assignment, DatasetSpec, Phase, encode
from strata.core.kv.txn import Decision, Plan, Put, Txn, absent, created_at, refusable, unchanged
from strata.errors import Conflict, InvalidArgument, QuotaExceeded

MAX_SHARDS = 100_000
"""The limit of shards per dataset: a leader's first division of so many takes about a tenth of a second."""


@refusable
def decide_register_dataset(job: JobView, name: str, spec: DatasetSpec) -> Decision:
    """Create a dataset. A repeated request with the same spec is settled; a different spec is a `Conflict`."""
    checked_id("dataset", name)
    if not 1 <= spec.shards <= MAX_SHARDS:
        raise InvalidArgument(f"{spec.shards} shards: a dataset has 1 to {MAX_SHARDS}")
    key = job.keys.dataset_spec(name)
    there = job.view.record(key, DatasetSpec)
    if there == spec:
        return Decision(reason=f"dataset {name} is registered")
    if there is not None:
        raise Conflict(
            f"dataset {name} of job {job.keys.name} is registered with another spec",
            hint="register the new one under a new name",
        )
    return Decision(
        reason=f"dataset {name} is registered with {spec.shards} shards",
        txn=Txn(compares=(absent(key),), success=(Put(key=key, value=encode(spec)),)),
    )


def owners_of(assignment: Assignment) -> list[str]:
    """Return the owner of each shard, by shard number."""
    seats = _seats_of(assignment)
    found = owners(seats.values(), assignment.shards, _moved_by_seat(assignment, seats))
    if not assignment.seats:
        return found
    worker_on = {seat: worker for worker, seat in seats.items()}
    return list(map(worker_on.__getitem__, found))


def _seats_of(assignment: Assignment) -> dict[str, str]:
    return {worker: assignment.seats.get(worker, worker) for worker in assignment.workers}


def _moved_by_seat(assignment: Assignment, seats: Mapping[str, str]) -> Moved:
    return {seats[worker]: taken for worker, taken in assignment.moved.items()}


def seated(workers: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the seat of each worker; `before`: the seats so far.

    A worker that stays keeps its seat. A newcomer takes the free seat of its own name, or else another free seat.
    If no seat is free, the newcomer gets a new seat of its own name, with a number appended if the name is taken.
    """
    seats = {worker: before[worker] for worker in sorted(workers) if worker in before}
    newcomers = sorted(set(workers) - seats.keys())
    empty = set(before.values()) - set(seats.values())
    seats.update((worker, worker) for worker in newcomers if worker in empty)
    empty -= set(seats.values())
    others = [worker for worker in newcomers if worker not in seats]
    seats.update(zip(others, sorted(empty), strict=False))
    taken = set(seats.values())
    for worker in others[len(empty) :]:
        names = chain([worker], (f"{worker}/{number}" for number in count(2)))
        seats[worker] = next(name for name in names if name not in taken)
        taken.add(seats[worker])
    return seats


def shards_of(assignment: Assignment) -> dict[str, list[int]]:
    """Return the shards of each worker, in order; a worker may own none."""
    found: dict[str, list[int]] = {worker: [] for worker in assignment.workers}
    for shard, worker in enumerate(owners_of(assignment)):
        found[worker].append(shard)
    return found


def plan_assignment(job: JobView, *, keys: ClusterKeys, epoch: int) -> Plan:
    """Return the writes of the leader of `epoch` that divide every dataset among the world's members."""
    world = job.world()
    if world is None or world.head.forming or job.phase() is not Phase.RUNNING:
        return Plan(reason=f"job {job.keys.name} has no world to divide datasets among")
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
        record = divided(
            workers,
            spec.record.shards,
            old.record if old is not None else None,
            epoch=epoch,
            generation=world.head.generation,
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
    return Plan(reason=reason, txns=tuple(txns))


def divided(
    workers: tuple[WorkerId, ...], shards: int, old: Assignment | None, *, epoch: int, generation: int
) -> Assignment:
    """Return the assignment of `shards` shards to `workers`, moving as few as possible from `old`."""
    before = _seats_of(old) if old is not None else {}
    seats = seated(workers, before)
    if old is not None and old.shards == shards:
        moved = assign(seats.values(), shards, before.values(), _moved_by_seat(old, before))
    else:
        moved = assign(seats.values(), shards)
    worker_on = {seat: worker for worker, seat in seats.items()}
    return Assignment(
        assign_epoch=old.assign_epoch + 1 if old is not None else 1,
        epoch=epoch,
        generation=generation,
        shards=shards,
        workers=workers,
        ring=RING,
        seats={worker: seat for worker, seat in sorted(seats.items()) if worker != seat},
        moved={worker_on[seat]: tuple(taken) for seat, taken in moved.items()},
    )
