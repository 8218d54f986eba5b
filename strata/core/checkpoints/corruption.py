"""When a copy counts as damaged (PROTOCOLS 8.8).

Whoever reads something else than was saved, twice and past every cache, reports it: the copy, and one object
that differs. The report lies at the attempt that owns the object. Until another host has read that object the
copy is *suspected*: it counts neither for retention nor as a base, and neither do the checkpoints up to the one
that was read which need the owner's objects.

1. Two hosts whose reports of a copy are open, or that reported one object, confirm it: the copy is CORRUPT, and
   so are those of the checkpoints up to the one that was read which need it. With its last copy a record is.
2. A host that reads the object as it was saved refutes the report, if it is the only open one. The reporting host
   is not believed of this object again until it has a worker that registered later. Of another object it is a
   report like any other.
3. A host that cannot read says so once, and confirms nothing. It looks again with its next chores.
4. A host is believed alone where the bytes are on its own disk, or while it is registered and no other host is
   that could look. A standby has no process that looks, and is not waited for.

A damaged checkpoint keeps its bytes until a newer one is committed: `checkpoint_deletion` sees to that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from strata.core.checkpoints.attempt import bases, named, uses
from strata.core.checkpoints.order import order
from strata.core.checkpoints.paths import folder_name
from strata.core.checkpoints.references import CorruptionReport
from strata.core.checkpoints.tiers import present_on, tiers_of
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, TierState, encode
from strata.core.kv.txn import Compare, Decision, Put, Txn, created_at, none_newer_in, refusable, unchanged
from strata.core.kv.view import Entry
from strata.errors import InvalidArgument, Refused

MAX_REASON_CHARS = 1000
MAX_DEPENDENTS, MAX_BYTES = 40, 1_000_000
"""How many checkpoints become CORRUPT in one transaction, and of what size; etcd refuses a very large one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageReport:
    """What `host` read on `tier` ("": the one at the record's path), past every cache.

    `object`: what differs, or was found `sound`, as "folder/file"; "": it is not known which, or all is sound.
    `generation`: the one that cannot begin without these bytes; 0: none waits for them. `unread`: the host could
    not look, and why not.
    """

    step: int
    attempt: str
    host: str
    reason: str
    tier: str = ""
    object: str = ""
    generation: int = 0
    sound: bool = False
    unread: bool = False


# -- what hosts said --------------------------------------------------------------------------


def reports(job: JobView, record: CheckpointRecord, tier: str) -> list[Entry[CorruptionReport]]:
    """Return what hosts said of the objects that this attempt owns on `tier`."""
    return list(job.view.entries(job.keys.suspects(*record.where, tier), CorruptionReport))


def _open(entry: Entry[CorruptionReport]) -> bool:
    return entry.record.corrupt and not entry.record.refuted_by


def _found(entry: Entry[CorruptionReport]) -> tuple[int, int]:
    return entry.record.found_generation, entry.record.found_step


def _about(job: JobView, record: CheckpointRecord, tier: str) -> list[Entry[CorruptionReport]]:
    """Return what hosts said of what a checkpoint needs on `tier`: of its own objects, and of those of its bases."""
    found = reports(job, record, tier)
    for base in bases(job, record):
        said = reports(job, base.record, tier)
        if any(each.record.corrupt and order(record) <= _found(each) for each in said):
            found += said
    return found


def suspected_tiers(job: JobView, record: CheckpointRecord) -> Iterator[str]:
    """Yield the copies that count as whole so far, and of which a report is open: of theirs, or of a base's."""
    if record.state is not CheckpointState.COMMITTED:
        return
    needed = [record, *(base.record for base in bases(job, record))]
    for name in present_on(record):
        if any(
            _open(each) and order(record) <= _found(each)
            for owner in needed
            if name in present_on(owner)
            for each in reports(job, owner, name)
        ):
            yield name


def is_suspect(job: JobView, record: CheckpointRecord) -> bool:
    """Tell whether a host reported damage of a copy: the record is not verified then."""
    return any(True for _ in suspected_tiers(job, record))


def is_whole(job: JobView, record: CheckpointRecord) -> bool:
    """Tell whether a committed checkpoint may stand in for others: it is not suspected, and no base is damaged."""
    lost = any(
        name in tiers_of(base.record) and name not in present_on(base.record)
        for base in bases(job, record)
        for name in present_on(record)
    )
    return not lost and not is_suspect(job, record)


def told(job: JobView, record: CheckpointRecord) -> Iterator[str]:
    """Yield what each host said of a copy that counts as whole, as a sentence; "host on tier" comes first."""
    for name in present_on(record):
        for entry in _about(job, record, name):
            word = entry.record
            who, what = entry.name, "found damage" if word.corrupt else "could not read it"
            if word.refuted_by:
                who, what = word.refuted_by, f"found no damage where {entry.name} did"
            yield f"{who} on {name}: {what}{f': {word.reason}' if word.reason else ''}"


def to_look_at(job: JobView, record: CheckpointRecord, tier: str, host: str) -> str | None:
    """Return the object that `host` is to read of what another reported; "": all of the copy; None: nothing."""
    reported = [entry for entry in reports(job, record, tier) if _open(entry)]
    if not reported or any(entry.name == host for entry in reported):
        return None
    return reported[0].record.object


def missed_by(job: JobView, record: CheckpointRecord, generation: int) -> bool:
    """Tell whether that generation could not begin because of damage to this record."""
    return any(
        entry.record.corrupt and entry.record.generation == generation
        for name in tiers_of(record)
        for entry in _about(job, record, name)
    )


def _incarnation(job: JobView, host: str) -> int:
    """Return when the newest worker of a host registered, as a revision; 0: none is registered."""
    return max((w.create_revision for w in job.workers() if w.record.host == host), default=0)


# -- a report ---------------------------------------------------------------------------------


@refusable
def decide_report_damage(job: JobView, report: DamageReport) -> Decision:
    """Take down what a host found; once it is enough the copy is CORRUPT, or the report refuted.

    `Refused` for a checkpoint that is being deleted, for missing bytes are no damage then; and for a host whose
    report was refuted. A report may come after others have settled the matter: that its generation cannot begin
    is taken down all the same.
    """
    read = named(job, report.step, report.attempt)
    tiers = tiers_of(read.record)
    tier = report.tier or next((n for n, t in tiers.items() if t.path == read.record.path), "")
    if tier not in tiers:
        raise InvalidArgument(f"step {report.step} has no copy on {tier or 'its path'}")
    held = _owner(job, read, tier, report.object)
    record, state = held.record, tiers_of(held.record)[tier].state
    corrupt = record.state is CheckpointState.CORRUPT or state is TierState.CORRUPT
    if corrupt and (report.sound or report.unread or not report.generation):
        return Decision(reason=f"step {record.step} on {tier} is corrupt")
    if not corrupt and (record.state is not CheckpointState.COMMITTED or state is not TierState.PRESENT):
        what = state if state is not TierState.PRESENT else record.state
        raise Refused(f"step {record.step} is {what.value}: its bytes need not be there")
    if report.sound:
        return _refute(job, held, tier, report)
    if report.unread:
        return _note_unread(job, held, tier, report)
    return _take_down(job, held, tier, report, order(read.record))


def _owner(job: JobView, read: Entry[CheckpointRecord], tier: str, damaged: str) -> Entry[CheckpointRecord]:
    """Return the attempt that owns the object, if it counts as whole on that tier; else the one that was read.

    Where it was reported of the latter, and of the former by nobody, it stays there: that is what hosts were asked.
    """
    if any(each.record.object == damaged for each in reports(job, read.record, tier)):
        return read
    folder = damaged.partition("/")[0]
    for base in bases(job, read.record):
        record = base.record
        named = folder == folder_name(*record.where)
        if named and record.state is CheckpointState.COMMITTED and tier in present_on(record):
            return base
    return read


def _refute(job: JobView, held: Entry[CheckpointRecord], tier: str, report: DamageReport) -> Decision:
    """Note that `report.host` read what another one reported, and found it as it was saved."""
    others = [each for each in reports(job, held.record, tier) if _open(each) and each.name != report.host]
    if len(others) != 1 or report.object not in {"", others[0].record.object}:
        return decide_confirm(job, held, tier)
    (refuted,) = others
    word = dataclasses.replace(
        refuted.record, refuted_by=report.host, incarnation=_incarnation(job, refuted.name)
    )
    return Decision(
        reason=f"{report.host} found no damage in step {held.record.step} on {tier}",
        txn=Txn(
            compares=(
                unchanged(held.key, held.mod_revision),
                unchanged(refuted.key, refuted.mod_revision),
                none_newer_in(job.keys.suspects(*held.record.where, tier), job.view.revision),
            ),
            success=(Put(key=refuted.key, value=encode(word)),),
        ),
    )


def _take_down(
    job: JobView, held: Entry[CheckpointRecord], tier: str, report: DamageReport, found: tuple[int, int]
) -> Decision:
    """Take down that `report.host` found damage; while its report is open, another object adds nothing to it."""
    record, known = held.record, _own(job, held.record, tier, report.host)
    word = CorruptionReport(
        corrupt=True,
        reason=report.reason[:MAX_REASON_CHARS],
        object=report.object,
        found_generation=found[0],
        found_step=found[1],
        generation=report.generation,
    )
    if known is not None:
        before, same = known.record, known.record.object == report.object
        if same and before.refuted_by and before.incarnation >= _incarnation(job, report.host):
            what = f"{before.object or 'it'}, which {report.host} reported of step {record.step}"
            hint = f"the memory or the disk controller of {report.host} may be at fault"
            raise Refused(f"{before.refuted_by} read {what}, and found it as it was saved", hint=hint)
        if _open(known):
            latest = max(found, _found(known)) if same else _found(known)
            word = dataclasses.replace(
                before,
                generation=max(report.generation, before.generation),
                found_generation=latest[0],
                found_step=latest[1],
            )
        if before == word:
            return decide_confirm(job, held, tier)
    return _put(job, held, tier, report.host, word, f"found damage in step {record.step}")


def _note_unread(job: JobView, held: Entry[CheckpointRecord], tier: str, report: DamageReport) -> Decision:
    """Note that `report.host` cannot read what others reported, once: it looks again with its next chores."""
    if _own(job, held.record, tier, report.host) is not None:
        return decide_confirm(job, held, tier)
    word = CorruptionReport(corrupt=False, reason=report.reason[:MAX_REASON_CHARS])
    return _put(job, held, tier, report.host, word, f"could not read step {held.record.step}")


def _own(job: JobView, record: CheckpointRecord, tier: str, host: str) -> Entry[CorruptionReport] | None:
    key = job.keys.suspect(*record.where, tier, host)
    return job.view.entry(key, CorruptionReport)


def _put(
    job: JobView, held: Entry[CheckpointRecord], tier: str, host: str, word: CorruptionReport, what: str
) -> Decision:
    record = held.record
    key = job.keys.suspect(*record.where, tier, host)
    return Decision(
        reason=f"{host} {what} on {tier}",
        txn=Txn(
            compares=(unchanged(held.key, held.mod_revision), unchanged(key, job.view.mod_revision(key))),
            success=(Put(key=key, value=encode(word)),),
        ),
    )


# -- what follows -----------------------------------------------------------------------------


def decide_confirm(job: JobView, held: Entry[CheckpointRecord], tier: str) -> Decision:
    """Mark a copy as CORRUPT if enough hosts found it damaged; else say who must look yet.

    Level-triggered: the leader asks it too, for the second host may have gone for good.
    """
    record, state = held.record, tiers_of(held.record)[tier].state
    said = [each for each in reports(job, record, tier) if each.record.corrupt]
    reported = next(filter(_open, said), None)
    if reported is None or record.state is not CheckpointState.COMMITTED or state is not TierState.PRESENT:
        return Decision(reason=f"step {record.step} on {tier} is not suspected")
    second = next(
        (
            each
            for each in said
            if each is not reported and (_open(each) or each.record.object == reported.record.object)
        ),
        None,
    )
    found = [reported] if second is None else [reported, second]
    compares: list[Compare] = [unchanged(each.key, each.mod_revision) for each in found]
    if second is None and tiers_of(record)[tier].shared:
        alone = [worker for worker in job.workers() if worker.record.host == reported.name]
        if others := _others(job, reported.name):
            what = f"{reported.name} alone found step {record.step} damaged"
            return Decision(reason=f"{what}: {others[0]} must look")
        # nobody came who could look, and it is there itself
        compares.append(none_newer_in(job.keys.workers, job.view.revision))
        compares.append(created_at(alone[0].key, alone[0].create_revision))
        compares.append(unchanged(job.keys.head, job.view.mod_revision(job.keys.head)))
    names = ", ".join(each.name for each in found)
    why = f"{tier}: {reported.record.reason} (found by {names})"
    corrupt = [held, *_dependents(job, record, tier, max(map(_found, found)))]
    return Decision(
        reason=f"step {record.step} is corrupt on {why}",
        txn=Txn(
            compares=(*(unchanged(e.key, e.mod_revision) for e in corrupt), *compares),
            success=tuple(Put(key=e.key, value=encode(_without(e.record, tier, why))) for e in corrupt),
        ),
    )


def _dependents(
    job: JobView, record: CheckpointRecord, tier: str, found: tuple[int, int]
) -> list[Entry[CheckpointRecord]]:
    """Return the checkpoints up to `found`, newest first, that need what `record` owns on `tier`."""
    need = [
        e
        for e in job.checkpoints()
        if e.record.state is CheckpointState.COMMITTED
        and tier in present_on(e.record)
        and order(e.record) <= found
        and uses(job, e.record, record)
    ]
    need.sort(key=lambda e: order(e.record), reverse=True)
    sizes = itertools.accumulate(len(encode(e.record)) for e in need)
    return [e for e, total in zip(need[:MAX_DEPENDENTS], sizes, strict=False) if total <= MAX_BYTES]


def _without(record: CheckpointRecord, tier: str, why: str) -> CheckpointRecord:
    """Return a record without this copy; CORRUPT itself if it was the last."""
    tiers = dict(tiers_of(record))
    tiers[tier] = dataclasses.replace(tiers[tier], state=TierState.CORRUPT)
    whole = any(each.state is TierState.PRESENT for each in tiers.values())
    state = record.state if whole else CheckpointState.CORRUPT
    return dataclasses.replace(record, state=state, tiers=tiers, reason=why[:MAX_REASON_CHARS])


def _others(job: JobView, host: str) -> list[str]:
    """Return the hosts that are to look before `host` is believed; none: it is believed alone.

    Those that are registered, unless a world of this host alone has begun: what stands by has no process
    that looks. While a world forms, or is about to end with a member, the next one is waited for. So is any
    host while this one is not registered: whoever comes first looks.
    """
    registered, world = job.workers(), job.world()
    if all(worker.record.host != host for worker in registered):
        return sorted({worker.record.host for worker in registered} - {""}) or ["the next host"]
    places = {(member.worker, member.incarnation) for member in world.members} if world is not None else set()
    inside = [worker for worker in registered if (worker.name, worker.create_revision) in places]
    begun = bool(inside) and len(inside) == len(places)
    return sorted({worker.record.host for worker in (inside if begun else registered)} - {host, ""})


def next_confirmation(job: JobView) -> Decision:
    """Decide the first report of this job that is confirmed and not yet written down."""
    for entry in job.checkpoints():
        if entry.record.state is CheckpointState.COMMITTED:
            for tier in present_on(entry.record):
                decision = decide_confirm(job, entry, tier)
                if decision.txn is not None:
                    return decision
    return Decision(reason="nothing is confirmed to be damaged")
