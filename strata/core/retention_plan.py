"""What a job's policy has the leader mark for deletion (PROTOCOLS 8.6).

Each tier is judged for itself. What no rule keeps there, and nobody needs, gets its tombstone: in a
transaction that compares the newer ones which the policy counted, so that one deletion does not rest on
checkpoints that another one, or damage, has taken away meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from strata.core.checkpoint_attempt import Author, authorised
from strata.core.checkpoint_damage import is_suspect, is_whole
from strata.core.checkpoint_deletion import decide_entomb
from strata.core.checkpoint_order import RESTORABLE_TYPES, counts, is_latest, superseded
from strata.core.checkpoint_records import Keep, Retention
from strata.core.checkpoint_tiers import present_on, tiers_of
from strata.core.job import JobView
from strata.core.records import CheckpointRecord, CheckpointState, encode
from strata.core.retention_rules import Candidate, check_keep, kept
from strata.core.txn import Compare, Decision, Put, Txn, refusable, unchanged
from strata.core.view import Entry
from strata.errors import Conflict

_DEAD = frozenset({CheckpointState.CORRUPT, CheckpointState.PREPARED})
SUSPECTED = "a host found it damaged, and another one is to look"
MAX_KEEPERS = 32
"""How many newer ones a tombstone compares; etcd refuses a transaction with very many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """A checkpoint, or its copy on one tier, that the policy does not keep."""

    entry: Entry[CheckpointRecord]
    tier: str
    keepers: tuple[Entry[CheckpointRecord], ...]


def retention(job: JobView) -> Entry[Retention] | None:
    """Return the policy of a job, or None: everything stays."""
    return job.view.entry(job.keys.retention, Retention)


@refusable
def decide_set_retention(
    job: JobView, wanted: Retention, *, author: Author | None = None, if_revision: int | None = None
) -> Decision:
    """Put a policy down; what it gives up goes from the next look of the leader on.

    `author` is the rank that hands its settings over. They are for all tiers: rules of one that it does not
    name stand; refused once its generation is over. `Conflict` when the policy is another than that of
    `if_revision`, 0: than none.
    """
    check_keep(wanted.keep)
    for keep in wanted.tiers.values():
        check_keep(keep)
    held, guards = retention(job), () if author is None else authorised(job, author)
    if held is not None and author is not None:
        wanted = dataclasses.replace(wanted, tiers={**held.record.tiers, **wanted.tiers})
    if held is not None and held.record == wanted:
        return Decision(reason="that is the policy")
    revision = held.mod_revision if held is not None else 0
    if if_revision not in {None, revision}:
        by = f" by {held.record.who}" if held is not None and held.record.who else ""
        raise Conflict(
            f"the policy of job {job.keys.name} was changed meanwhile{by}",
            hint="look at it, and say again what shall hold",
        )
    return Decision(
        reason=f"{wanted.who or 'somebody'} sets the policy of job {job.keys.name}",
        txn=Txn(
            compares=(*guards, unchanged(job.keys.retention, revision)),
            success=(Put(key=job.keys.retention, value=encode(wanted)),),
        ),
    )


def reasons(job: JobView, *, now_unix_ms: int) -> dict[str, dict[str, str]]:
    """Return, by tier, why each of its checkpoints stays; one that is absent is to go."""
    return _reasons(job, candidates(job), now_unix_ms=now_unix_ms)


def _reasons(job: JobView, known: Mapping[str, Candidate], *, now_unix_ms: int) -> dict[str, dict[str, str]]:
    held = retention(job)
    found = {}
    for tier in _tiers(job):
        there = [e for e in job.checkpoints() if _is_on(e.record, tier)]
        keep = held.record.tiers.get(tier, held.record.keep) if held is not None else Keep()
        found[tier] = kept((known[e.key] for e in there), keep, now_unix_ms=now_unix_ms)
        for entry in there:
            if is_suspect(job, entry.record):  # if this copy is good, the other one may not be
                found[tier].setdefault(entry.key, SUSPECTED)
    return found


def going(job: JobView, *, now_unix_ms: int) -> list[Going]:
    """Return what no rule keeps: whole checkpoints where that holds on all their tiers."""
    held = retention(job)
    if held is None:
        return []
    known, found = candidates(job), []
    stays = _reasons(job, known, now_unix_ms=now_unix_ms)
    for entry in job.checkpoints():
        record = entry.record
        if record.state is CheckpointState.COMMITTED:
            there = present_on(record)
            given_up = [tier for tier in there if entry.key not in stays[tier]]
            keepers = _keepers(job, held.record, record, given_up, known)
            names = given_up if len(given_up) < len(there) else [""]
            found += [Going(entry=entry, tier=tier, keepers=keepers) for tier in names]
        elif record.state in _DEAD and not held.record.keep.everything:
            keepers = _keepers(job, held.record, record, list(tiers_of(record)), known)
            if len(keepers) >= min(held.record.keep.latest, MAX_KEEPERS):
                found.append(Going(entry=entry, tier="", keepers=keepers))
    return found


def next_tombstone(job: JobView, *, now_unix_ms: int) -> Decision:
    """Decide the first deletion that is due and that nobody's need stands against.

    For the leader, which adds its fence and asks again until nothing is left to mark.
    """
    policy = job.view.mod_revision(job.keys.retention)
    for each in going(job, now_unix_ms=now_unix_ms):
        decision = decide_entomb(job, each.entry, tier=each.tier, keepers=each.keepers)
        if decision.txn is not None:
            asked: Compare = unchanged(job.keys.retention, policy)
            return Decision(reason=f"{decision.reason}: no rule keeps it", txn=decision.txn.and_if(asked))
    return Decision(reason="the policy gives nothing up")


def pending(job: JobView, *, now_unix_ms: int) -> int:
    """Return how many deletions the leader has still to mark."""
    return sum(
        decide_entomb(job, each.entry, tier=each.tier, keepers=each.keepers).txn is not None
        for each in going(job, now_unix_ms=now_unix_ms)
    )


def next_age_ms(job: JobView, *, now_unix_ms: int) -> int | None:
    """Return in how many milliseconds the next checkpoint is too old, or None: by no rule of age."""
    held = retention(job)
    if held is None:
        return None
    ages = [keep.age_ms for keep in (held.record.keep, *held.record.tiers.values()) if keep.age_ms]
    waits = (
        e.record.created_unix_ms + age - now_unix_ms
        for e in job.checkpoints()
        if e.record.state is CheckpointState.COMMITTED
        for age in ages
    )
    return min((wait for wait in waits if wait > 0), default=None)


def candidates(job: JobView) -> dict[str, Candidate]:
    """Return the committed records as the rules look at them, by their keys."""
    return {
        e.key: _candidate(job, e) for e in job.checkpoints() if e.record.state is CheckpointState.COMMITTED
    }


def _candidate(job: JobView, entry: Entry[CheckpointRecord]) -> Candidate:
    record, latest = entry.record, job.latest()
    taken = is_latest(latest.record if latest is not None else None, record)
    return Candidate(
        key=entry.key,
        type=record.type,
        step=record.step,
        counts=counts(job, record),
        created_unix_ms=record.created_unix_ms,
        # what somebody found damaged is no newer one for anybody either
        superseded=(superseded(job, record) and not taken) or not is_whole(job, record),
        metadata=record.metadata,
    )


def _keepers(
    job: JobView,
    policy: Retention,
    record: CheckpointRecord,
    tiers: list[str],
    known: Mapping[str, Candidate],
) -> tuple[Entry[CheckpointRecord], ...]:
    """Return the newer ones that let this one go: as many as the policy counts, on each of the tiers."""
    found: dict[str, Entry[CheckpointRecord]] = {}
    mine = counts(job, record)
    for tier in tiers:
        keep = policy.tiers.get(tier, policy.keep)
        newer = [
            e
            for e in job.checkpoints()
            if _is_on(e.record, tier)
            and e.record.type in RESTORABLE_TYPES
            and counts(job, e.record) > mine
            and not known[e.key].superseded
        ]
        newer.sort(key=lambda e: counts(job, e.record), reverse=True)
        found |= {e.key: e for e in newer[: keep.latest]}
    return tuple(found.values())[:MAX_KEEPERS]


def _tiers(job: JobView) -> Iterator[str]:
    names = {
        name
        for entry in job.checkpoints()
        if entry.record.state is CheckpointState.COMMITTED
        for name in present_on(entry.record)
    }
    yield from sorted(names)


def _is_on(record: CheckpointRecord, tier: str) -> bool:
    return record.state is CheckpointState.COMMITTED and tier in present_on(record)
