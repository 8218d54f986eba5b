"""When a copy counts as damaged (PROTOCOLS 8.8).

Whoever reads something else than was saved, twice and past every cache, says so: that is a suspicion, and
private, for the fault may be its own memory or disk controller. A second host that finds the same confirms
it; where no second host can look, because none has a rank in the world or the bytes are on the first one's
own disk, it is confirmed alone. Then that copy is CORRUPT, and with its last copy the record is.

A report names the copy: a damaged near one says nothing of the far one. A standby has no process that could
look, and is not waited for.

A damaged checkpoint keeps its bytes until a newer one is committed: `checkpoint_deletion` sees to that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from strata.core.checkpoint_attempt import refuse
from strata.core.checkpoint_order import find
from strata.core.checkpoint_pins import not_found
from strata.core.checkpoint_records import Suspect
from strata.core.checkpoint_tiers import tiers_of
from strata.core.job import JobView
from strata.core.records import CheckpointRecord, CheckpointState, TierState, encode
from strata.core.txn import Compare, Decision, Put, Txn, none_newer_in, unchanged
from strata.core.view import Entry
from strata.errors import InvalidArgument, Refused

MAX_REASON_CHARS = 1000
MAX_OBJECTS = 32
"""More than so many damaged objects are not named one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageReport:
    """What `host` read on `tier` ("": the one at the record's path), past every cache.

    `generation`: the one that cannot begin without these bytes; 0: none waits for them. `objects`: what
    differs, or was found `sound`, as "folder/file"; none: it is not known which, or all is sound. `unread`: the
    host could not look, and why not; then `sound` says nothing.
    """

    step: int
    attempt: str
    host: str
    reason: str
    tier: str = ""
    sound: bool = False
    generation: int = 0
    objects: tuple[str, ...] = ()
    unread: bool = False


def suspicions(job: JobView, record: CheckpointRecord, tier: str) -> list[Entry[Suspect]]:
    """Return what hosts said of one copy."""
    folder = job.keys.suspects(record.step, record.generation, record.attempt, tier)
    return list(job.view.entries(folder, Suspect))


def suspected_tiers(job: JobView, record: CheckpointRecord) -> Iterator[str]:
    """Yield the copies that somebody found damaged and that count as whole so far."""
    for name, tier in tiers_of(record).items():
        if tier.state is TierState.PRESENT and any(
            each.record.corrupt for each in suspicions(job, record, name)
        ):
            yield name


def doubts(job: JobView, record: CheckpointRecord) -> Iterator[str]:
    """Yield what each host said of a suspected copy, as a sentence; "host on tier" comes first."""
    for name in suspected_tiers(job, record):
        for word in suspicions(job, record, name):
            said = word.record
            what = (
                "found damage" if said.corrupt else "could not read it" if said.unread else "found it sound"
            )
            yield f"{word.name} on {name}: {what}{f': {said.reason}' if said.reason else ''}"


def to_look_at(job: JobView, record: CheckpointRecord, tier: str, host: str) -> tuple[str, ...] | None:
    """Return what `host` has not read of what others found damaged on a copy; (): all of it; None: nothing.

    That it found one image sound says nothing of those which are named later.
    """
    words = {word.name: word.record for word in suspicions(job, record, tier)}
    own = words.pop(host, None)
    named = [word.objects for word in words.values() if word.corrupt]
    if not named or (own is not None and (own.corrupt or not (own.sound or own.unread))):
        return None  # its word, of damage or of the whole copy, is there
    if not all(named):
        return ()
    return tuple(sorted({one for each in named for one in each} - set(own.sound if own else ()))) or None


def is_suspect(job: JobView, record: CheckpointRecord) -> bool:
    """Tell whether somebody found a copy damaged: the record is not verified then."""
    return any(True for _ in suspected_tiers(job, record))


def missed_by(job: JobView, record: CheckpointRecord, generation: int) -> bool:
    """Tell whether that generation could not begin because of damage to this record."""
    return any(
        each.record.corrupt and each.record.generation == generation
        for name in tiers_of(record)
        for each in suspicions(job, record, name)
    )


def decide_report_damage(job: JobView, report: DamageReport) -> Decision:
    """Keep what a host found; with a second one that found the same the copy is CORRUPT.

    Settled once the host's word is on record, and the copy marked if that was enough. A word may come after
    others have settled the matter: that its generation cannot begin is taken down all the same. `Refused` for
    a checkpoint that is being deleted: that its bytes are missing is no damage.
    """
    held = find(job, report.step, report.attempt) if report.attempt else None
    if held is None:
        return refuse(not_found(report.step, report.attempt))
    record, tiers = held.record, tiers_of(held.record)
    tier = report.tier or next((n for n, t in tiers.items() if t.path == record.path), "")
    if tier not in tiers:
        return refuse(InvalidArgument(f"step {record.step} has no copy on {tier or 'its path'}"))
    state = tiers[tier].state
    corrupt = record.state is CheckpointState.CORRUPT or state is TierState.CORRUPT
    if corrupt and (report.sound or report.unread or not report.generation):
        return Decision(reason=f"step {record.step} on {tier} is corrupt")
    if not corrupt and (record.state is not CheckpointState.COMMITTED or state is not TierState.PRESENT):
        what = state if state is not TierState.PRESENT else record.state
        return refuse(Refused(f"step {record.step} is {what.value}: its bytes need not be there"))
    key = job.keys.suspect(record.step, record.generation, record.attempt, tier, report.host)
    known = job.view.entry(key, Suspect)
    word = _word(report, known.record if known is not None else None)
    if known is not None and known.record == word:
        return decide_confirm(job, held, tier)
    return Decision(
        reason=f"{report.host} {_said(report)} step {record.step} on {tier}",
        txn=Txn(
            compares=(
                unchanged(held.key, held.mod_revision),
                unchanged(key, known.mod_revision if known is not None else 0),
            ),
            success=(Put(key=key, value=encode(word)),),
        ),
    )


def _said(report: DamageReport) -> str:
    return "could not read" if report.unread else "found no damage in" if report.sound else "found damage in"


def _word(report: DamageReport, known: Suspect | None) -> Suspect:
    """Return what a host says from now on: of several of its ranks, what each of them found."""
    if report.unread:
        told = known or Suspect(corrupt=False, reason="")
        unread = dataclasses.replace(told, unread=True, reason=report.reason[:MAX_REASON_CHARS])
        return told if told.corrupt or told.unread else unread  # each new reason would have it try again
    if report.sound:
        return _sound_word(report, known)
    objects, generation = set(report.objects), report.generation
    if known is not None and known.corrupt:
        generation = max(generation, known.generation)
        objects = objects | set(known.objects) if objects and known.objects else set()
    sound = set(known.sound if known is not None else ()) - objects
    return Suspect(
        corrupt=True,
        reason=report.reason[:MAX_REASON_CHARS],
        generation=generation,
        objects=tuple(sorted(objects)) if len(objects) <= MAX_OBJECTS else (),
        sound=tuple(sorted(sound)),
    )


def _sound_word(report: DamageReport, known: Suspect | None) -> Suspect:
    """Add what was found sound to a host's word; of the whole copy, that replaces it.

    Of very many objects some are forgotten: the host may be asked for those again.
    """
    word = Suspect(corrupt=False, reason=report.reason[:MAX_REASON_CHARS])
    if not report.objects:
        return word
    sound = {*report.objects, *(known.sound if known is not None else ())}
    if known is not None and not (known.corrupt or known.sound or known.unread):
        return known  # of the whole copy
    if known is not None and known.corrupt:
        damaged = tuple(one for one in known.objects if one not in report.objects)
        if damaged or not known.objects:
            word = dataclasses.replace(known, objects=damaged)
    return dataclasses.replace(word, sound=tuple(sorted(sound)[:MAX_OBJECTS]))


def decide_confirm(job: JobView, held: Entry[CheckpointRecord], tier: str) -> Decision:
    """Mark a copy as CORRUPT if it was found damaged by enough hosts; else say who must look yet.

    Level-triggered: the leader asks it too, for the second host may have gone for good.
    """
    record, tiers = held.record, dict(tiers_of(held.record))
    words = suspicions(job, record, tier)
    damaged = [word for word in words if word.record.corrupt]
    if (
        not damaged
        or record.state is not CheckpointState.COMMITTED
        or tiers[tier].state is not TierState.PRESENT
    ):
        return Decision(reason=f"step {record.step} on {tier} is not suspected")
    compares: list[Compare] = [unchanged(word.key, word.mod_revision) for word in damaged[:2]]
    if len(damaged) == 1 and tiers[tier].shared:
        if others := _others(job, damaged[0].name):
            return Decision(
                reason=f"{damaged[0].name} alone found step {record.step} damaged: {others[0]} must look"
            )
        # nobody came who could look
        compares.append(none_newer_in(job.keys.workers, job.view.revision))
        compares.append(unchanged(job.keys.head, job.view.mod_revision(job.keys.head)))
    tiers[tier] = dataclasses.replace(tiers[tier], state=TierState.CORRUPT)
    whole = any(each.state is TierState.PRESENT for each in tiers.values())
    why = f"{tier}: {damaged[0].record.reason} (found by {', '.join(word.name for word in damaged[:4])})"
    after = dataclasses.replace(
        record,
        state=record.state if whole else CheckpointState.CORRUPT,
        tiers=tiers,
        reason=why[:MAX_REASON_CHARS],
    )
    return Decision(
        reason=f"step {record.step} is corrupt on {why}",
        txn=Txn(
            compares=(unchanged(held.key, held.mod_revision), *compares),
            success=(Put(key=held.key, value=encode(after)),),
        ),
    )


def _others(job: JobView, host: str) -> list[str]:
    """Return the hosts beside this one whose word is waited for; none: it is believed alone.

    Those that are registered, unless a world of this host alone has begun: what stands by has no process
    that looks. While a world forms, or is about to end with a member, the next one is waited for.
    """
    registered = {worker.name: worker for worker in job.workers()}
    others = {worker.record.host for worker in registered.values()} - {host, ""}
    world = job.world()
    if not others or world is None or world.head.forming:
        return sorted(others)
    inside = [registered.get(member.worker) for member in world.members]
    if any(
        worker is None or worker.create_revision != member.incarnation
        for worker, member in zip(inside, world.members, strict=True)
    ):
        return sorted(others)
    return sorted({worker.record.host for worker in inside if worker is not None} - {host, ""})


def next_confirmation(job: JobView) -> Decision:
    """Decide the first suspicion of this job that is confirmed and not yet written down."""
    for entry in job.checkpoints():
        if entry.record.state is CheckpointState.COMMITTED:
            for tier in suspected_tiers(job, entry.record):
                decision = decide_confirm(job, entry, tier)
                if decision.txn is not None:
                    return decision
    return Decision(reason="nothing is confirmed to be damaged")
