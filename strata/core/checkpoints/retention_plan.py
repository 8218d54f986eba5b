"""Applying a job's retention policy: the deletions that the leader must mark (PROTOCOLS 8.6).

The policy is applied to each tier separately. If no rule keeps a copy, and nothing needs it, the copy gets its
tombstone in a transaction that compares a newer checkpoint. So no deletion relies on a checkpoint that another
deletion, or damage, has removed meanwhile.
"""

from __future__ import annotations

import dataclasses

from strata.core.checkpoints.attempt import Author, authorised
from strata.core.checkpoints.corruption import has_open_report, is_whole
from strata.core.checkpoints.deletion import decide_tombstone
from strata.core.checkpoints.order import counts, superseded
from strata.core.checkpoints.references import Keep, Retention
from strata.core.checkpoints.retention_rules import Candidate, check_keep, kept
from strata.core.checkpoints.tiers import present_on
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, encode
from strata.core.kv.txn import Compare, Decision, Put, Txn, refusable, unchanged
from strata.core.kv.view import Entry
from strata.errors import Conflict

_DEAD = frozenset({CheckpointState.CORRUPT, CheckpointState.PREPARED})
SUSPECTED = "a host found it damaged, and another host must verify it"


def retention(job: JobView) -> Entry[Retention] | None:
    """Return the policy of a job, or None: all checkpoints stay."""
    return job.view.entry(job.keys.retention, Retention)


@refusable
def decide_set_retention(
    job: JobView, wanted: Retention, *, author: Author | None = None, if_revision: int | None = None
) -> Decision:
    """Store a policy; the leader applies the policy from its next pass on.

    `author`: the rank whose settings contain the policy; refused once the rank's generation is over. The settings
    apply to all tiers, but existing rules stay for tiers that the settings do not name. `if_revision`: `Conflict`
    if the stored policy has another revision; with 0, `Conflict` if there is a policy.
    """
    check_keep(wanted.keep)
    for keep in wanted.tiers.values():
        check_keep(keep)
    held, guards = retention(job), () if author is None else authorised(job, author)
    if held is not None and author is not None:
        wanted = dataclasses.replace(wanted, tiers={**held.record.tiers, **wanted.tiers})
    if held is not None and held.record == wanted:
        return Decision(reason="the policy is set already")
    revision = held.mod_revision if held is not None else 0
    if if_revision not in {None, revision}:
        by = f" by {held.record.who}" if held is not None and held.record.who else ""
        raise Conflict(
            f"the policy of job {job.keys.name} was changed meanwhile{by}",
            hint="read the policy, and set it again",
        )
    return Decision(
        reason=f"{wanted.who or 'somebody'} sets the policy of job {job.keys.name}",
        txn=Txn(
            compares=(*guards, unchanged(job.keys.retention, revision)),
            success=(Put(key=job.keys.retention, value=encode(wanted)),),
        ),
    )


def reasons(job: JobView, *, now_unix_ms: int) -> dict[str, dict[str, str]]:
    """Return, by tier, why each checkpoint that stays does so; the other checkpoints of the tier are to be deleted."""
    held, found = retention(job), {}
    committed = [e for e in job.checkpoints() if e.record.state is CheckpointState.COMMITTED]
    known = {e.key: _candidate(job, e) for e in committed}
    for tier in sorted({name for e in committed for name in present_on(e.record)}):
        there = [e for e in committed if tier in present_on(e.record)]
        keep = held.record.tiers.get(tier, held.record.keep) if held is not None else Keep()
        found[tier] = kept((known[e.key] for e in there), keep, now_unix_ms=now_unix_ms)
        for entry in there:
            if has_open_report(
                job, entry.record
            ):  # even if this copy is good, another copy of the checkpoint is suspected
                found[tier].setdefault(entry.key, SUSPECTED)
    return found


def going(job: JobView, *, now_unix_ms: int) -> list[tuple[Entry[CheckpointRecord], str]]:
    """Return the checkpoints that no rule keeps, each with the tier of the copy; "" if no rule keeps it on any tier."""
    held = retention(job)
    if held is None:
        return []
    stays = reasons(job, now_unix_ms=now_unix_ms)
    found: list[tuple[Entry[CheckpointRecord], str]] = []
    for entry in job.checkpoints():
        record = entry.record
        if record.state is CheckpointState.COMMITTED:
            there = present_on(record)
            given_up = [tier for tier in there if entry.key not in stays[tier]]
            names = given_up if len(given_up) < len(there) else [""]
            found += [(entry, tier) for tier in names]
        elif record.state in _DEAD and not held.record.keep.everything:
            found.append((entry, ""))
    return found


def next_tombstone(job: JobView, *, now_unix_ms: int) -> Decision:
    """Decide the first deletion that is due and that nothing prevents.

    Only the leader calls this. The leader adds its fence, and repeats the call until nothing is left to mark.
    """
    policy = job.view.mod_revision(job.keys.retention)
    for entry, tier in going(job, now_unix_ms=now_unix_ms):
        decision = decide_tombstone(job, entry, tier=tier)
        if decision.txn is not None:
            same_policy: Compare = unchanged(job.keys.retention, policy)
            return Decision(
                reason=f"{decision.reason}: no rule keeps it", txn=decision.txn.and_if(same_policy)
            )
    return Decision(reason="the policy deletes nothing")


def pending(job: JobView, *, now_unix_ms: int) -> int:
    """Return how many deletions the leader still has to mark."""
    return sum(
        decide_tombstone(job, entry, tier=tier).txn is not None
        for entry, tier in going(job, now_unix_ms=now_unix_ms)
    )


def _candidate(job: JobView, entry: Entry[CheckpointRecord]) -> Candidate:
    record = entry.record
    return Candidate(
        key=entry.key,
        type=record.type,
        step=record.step,
        counts=counts(job, record),
        created_unix_ms=record.created_unix_ms,
        # a checkpoint with a damage report must not count as the newer one of any other checkpoint either
        superseded=superseded(job, record) or not is_whole(job, record),
        metadata=record.metadata,
    )
