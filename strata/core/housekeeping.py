"""Housekeeping by the leader: deletion of ended generations' keys, and of members whose replica was lost.

Members are deleted by *soft* times, that is, by how long the leader itself has observed a condition. A new leader
restarts the count, which only delays a deletion.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from strata.core.checkpoints.order import supersedes_any
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys, number
from strata.core.kv.records import Leader, Replica, Worker
from strata.core.kv.txn import (
    Delete,
    Operation,
    Plan,
    Txn,
    created_at,
    delete_prefix,
    none_newer_in,
    unchanged,
)
from strata.core.kv.view import Entry

K = TypeVar("K")

KEPT_GENERATIONS = 8
"""The number of generations kept, including the current one. A stop adds two quickly: a forming one and the next."""
MAX_OPS = 90
"""The limit for one transaction; below the 100 of PROTOCOLS 2.5, to leave space for its compares."""
MAX_ORPHANS = 30
"""The limit for one transaction: if one of these members is handed over meanwhile, the whole transaction fails."""


def first_seen(before: Mapping[K, float], present: Iterable[K], now: float) -> dict[K, float]:
    """Return, for each key present now, the time at which it was first seen; absent keys are forgotten."""
    return {key: before.get(key, now) for key in present}


# -- ended generations (PROTOCOLS 6.6) --------------------------------------------------------


def plan_ended_generations(job: JobView, *, keys: ClusterKeys, epoch: int) -> Plan:
    """Delete the worlds and barriers of all generations except the newest `KEPT_GENERATIONS`.

    Kept generations serve late requests: a rank may request the outcome of a barrier, and a client may repeat a
    stop request to learn whether it was carried out. `worlds/<gen>/restored` stays as long as it supersedes a
    checkpoint (PROTOCOLS 8.4). A key that supersedes no checkpoint never supersedes one later, because no record of
    an older generation is begun after that world.
    """
    view, head = job.view, job.head()
    ended = range(job.generation() - KEPT_GENERATIONS + 1)
    names = {
        generation
        for generation in map(int, view.names(job.keys.worlds))
        if view.names(job.keys.generation(generation)) != ["restored"] or not supersedes_any(job, generation)
    }
    for barrier in view.names(job.keys.barriers):
        names |= {int(name) for name in view.names(job.keys.barrier_name(barrier))}
    due = sorted(names.intersection(ended))
    if head is None or not due:
        return Plan(reason=f"job {job.keys.name} has no ended generation to delete")
    deletes: list[Operation] = []
    for generation in due:
        folder, restored = job.keys.generation(generation), job.keys.restored(generation)
        if supersedes_any(job, generation):
            # keys that sort before `restored`: chunks (digits), done, failed, held, notice
            deletes.append(Delete(key=folder, range_end=restored))
            deletes.append(delete_prefix(job.keys.stopped(generation)))
        else:
            deletes.append(delete_prefix(folder))
    for barrier in job.view.names(job.keys.barriers):
        there = set(job.view.names(job.keys.barrier_name(barrier)))
        deletes += (
            delete_prefix(job.keys.barrier_generation(barrier, generation))
            for generation in due
            if number(generation) in there
        )
    guards = (
        created_at(keys.leader, epoch),
        unchanged(job.keys.head, head.mod_revision),
    )
    txns = tuple(
        Txn(compares=guards, success=tuple(deletes[start : start + MAX_OPS]))
        for start in range(0, len(deletes), MAX_OPS)
    )
    return Plan(reason=f"generations {', '.join(map(str, due))} are deleted", txns=txns)


# -- orphans (PROTOCOLS 5.4) ------------------------------------------------------------------

Orphan = tuple[str, str, int]
"""Job, worker, and the mod_revision of its key, which a hand-over changes."""


def orphans(job: JobView, *, keys: ClusterKeys) -> dict[Orphan, Entry[Worker]]:
    """Return the members whose replica instance does not exist any more.

    The leader counts as existing, even if its own replica key has expired.
    """
    instances = {entry.record.instance for entry in job.view.entries(keys.replicas, Replica)}
    leader = job.view.record(keys.leader, Leader)
    if leader is not None:
        instances.add(leader.instance)
    return {
        (job.keys.name, worker.name, worker.mod_revision): worker
        for worker in job.workers()
        if worker.record.served_by not in instances
    }


def plan_orphans(
    job: JobView,
    *,
    keys: ClusterKeys,
    epoch: int,
    orphaned_since_ms: Mapping[Orphan, float],
    calm_since_ms: float,
    now_ms: float,
    orphan_s: float = 5.0,
    arriving: Collection[str] = (),
) -> Plan:
    """Delete the members whose replica has not existed for `orphan_s`.

    `calm_since_ms`: when this leader took the lead, or when the last replica became ready, whichever is later.
    Since then members could reconnect to another replica. `arriving`: members that are reconnecting. These members
    are alive, and only the write of their hand-over is pending.
    """
    waits_ms = orphan_s * 1000
    found = orphans(job, keys=keys)
    due = [
        entry
        for orphan, entry in found.items()
        if now_ms - max(calm_since_ms, orphaned_since_ms.get(orphan, now_ms)) >= waits_ms
        and entry.name not in arriving
    ]
    if not due:
        return Plan(reason=f"job {job.keys.name}: {len(found)} members without a replica")
    guards = (
        created_at(keys.leader, epoch),
        none_newer_in(keys.replicas, job.view.revision),  # the replica has not returned
    )
    txns = []
    for start in range(0, len(due), MAX_ORPHANS):
        batch = due[start : start + MAX_ORPHANS]
        same = (unchanged(entry.key, entry.mod_revision) for entry in batch)
        deletes = tuple(Delete(key=entry.key) for entry in batch)
        txns.append(Txn(compares=(*guards, *same), success=deletes))
    names = ", ".join(entry.name for entry in due[:4])
    more = f" and {len(due) - 4} more" if len(due) > 4 else ""
    return Plan(reason=f"{names}{more}: no replica has served them for {orphan_s:g} s", txns=tuple(txns))
