"""Corruption reports: when a copy of a checkpoint counts as damaged (PROTOCOLS 8.8).

A host reports damage after two reads that bypass every cache and return other bytes than the saved ones. The report
names the copy and one object that differs, and is stored under the attempt that owns the object. Until another host
has read that object, the copy is *suspected*: it does not count for retention, nor as a base. Later checkpoints
that need the owner's objects are suspected too, up to the checkpoint that the host read.

1. Two hosts confirm damage if both have open reports of a copy, or if both reported the same object: the copy
   becomes CORRUPT. So do the copies of later checkpoints that need this copy, up to the checkpoint that was read. A
   record whose last copy is corrupt becomes CORRUPT too.
2. If a second host finds the object as it was saved, and the first host's report is the only open report, the first
   report is refuted. The reporting host cannot report this object again until a new worker of this host registers.
   Its reports of other objects count.
3. A host that cannot read the object reports this once; the report confirms nothing. The host retries with its next
   maintenance tasks.
4. One host's report suffices if the bytes are on its own disk, or if the host is registered and no other registered
   host could verify the object. A standby has no process that verifies, so nothing waits for it.

A damaged checkpoint keeps its bytes until a newer one is committed: `core.checkpoints.deletion` ensures that.
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
"""Limits for one transaction: the checkpoints that become CORRUPT, and their total size; etcd refuses larger ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageReport:
    """The result of a read by `host` on `tier` ("": the tier at the record's path), past every cache.

    `object`: the object that differs, or that was found `sound`, as "folder/file"; "": unknown, or all objects are
    sound. `generation`: the generation that cannot begin without these bytes; 0: no generation waits for them.
    `unread`: the host could not read the object, and `reason` says why.
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


# -- stored reports ---------------------------------------------------------------------------


def reports(job: JobView, record: CheckpointRecord, tier: str) -> list[Entry[CorruptionReport]]:
    """Return the hosts' reports about the objects that this attempt owns on `tier`."""
    return list(job.view.entries(job.keys.suspects(*record.where, tier), CorruptionReport))


def _open(entry: Entry[CorruptionReport]) -> bool:
    return entry.record.corrupt and not entry.record.refuted_by


def _found(entry: Entry[CorruptionReport]) -> tuple[int, int]:
    return entry.record.found_generation, entry.record.found_step


def _about(job: JobView, record: CheckpointRecord, tier: str) -> list[Entry[CorruptionReport]]:
    """Return the reports about a checkpoint's own objects on `tier`, and about those of its bases."""
    found = reports(job, record, tier)
    for base in bases(job, record):
        base_reports = reports(job, base.record, tier)
        if any(each.record.corrupt and order(record) <= _found(each) for each in base_reports):
            found += base_reports
    return found


def reported_tiers(job: JobView, record: CheckpointRecord) -> Iterator[str]:
    """Yield the tiers whose copy is not CORRUPT yet, but has an open report on itself or on a base."""
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


def has_open_report(job: JobView, record: CheckpointRecord) -> bool:
    """Return whether a copy has an open corruption report. Such a record does not count as verified."""
    return any(True for _ in reported_tiers(job, record))


def is_whole(job: JobView, record: CheckpointRecord) -> bool:
    """Return whether a committed checkpoint may replace others: no open report on it, no damaged base."""
    lost = any(
        name in tiers_of(base.record) and name not in present_on(base.record)
        for base in bases(job, record)
        for name in present_on(record)
    )
    return not lost and not has_open_report(job, record)


def report_texts(job: JobView, record: CheckpointRecord) -> Iterator[str]:
    """Yield a sentence for each report on a copy that is not CORRUPT yet; each sentence begins with "host on tier"."""
    for name in present_on(record):
        for entry in _about(job, record, name):
            report_record = entry.record
            who, what = entry.name, "found damage" if report_record.corrupt else "could not read it"
            if report_record.refuted_by:
                who, what = report_record.refuted_by, f"found no damage where {entry.name} did"
            yield f"{who} on {name}: {what}{f': {report_record.reason}' if report_record.reason else ''}"


def object_to_verify(job: JobView, record: CheckpointRecord, tier: str, host: str) -> str | None:
    """Return the object that `host` must read to check another host's report; "": the whole copy; None: nothing."""
    reported = [entry for entry in reports(job, record, tier) if _open(entry)]
    if not reported or any(entry.name == host for entry in reported):
        return None
    return reported[0].record.object


def missed_by(job: JobView, record: CheckpointRecord, generation: int) -> bool:
    """Return whether that generation could not begin because of damage to this record."""
    return any(
        entry.record.corrupt and entry.record.generation == generation
        for name in tiers_of(record)
        for entry in _about(job, record, name)
    )


def _incarnation(job: JobView, host: str) -> int:
    """Return the create revision of the newest registered worker of a host; 0: none is registered."""
    return max((w.create_revision for w in job.workers() if w.record.host == host), default=0)


# -- a report ---------------------------------------------------------------------------------


@refusable
def decide_report_damage(job: JobView, report: DamageReport) -> Decision:
    """Record a host's finding; with enough reports the copy becomes CORRUPT, or the report is refuted.

    `Refused` for a checkpoint in deletion, whose bytes may be missing, and for a host whose report of the object was
    refuted. Even if other hosts' reports have already decided the case, the decision records that the reporter's
    generation cannot begin.
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
    """Return the attempt that owns the object, if that attempt counts as whole on this tier; else the attempt read.

    If the object was already reported under the attempt that was read, its report stays there, because hosts look
    for it under that attempt.
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
    """Record that `report.host` read an object that another host reported, and found it as it was saved."""
    others = [each for each in reports(job, held.record, tier) if _open(each) and each.name != report.host]
    if len(others) != 1 or report.object not in {"", others[0].record.object}:
        return decide_confirm(job, held, tier)
    (refuted,) = others
    report_record = dataclasses.replace(
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
            success=(Put(key=refuted.key, value=encode(report_record)),),
        ),
    )


def _take_down(
    job: JobView, held: Entry[CheckpointRecord], tier: str, report: DamageReport, found: tuple[int, int]
) -> Decision:
    """Record damage found by `report.host`; while that host's report is open, damage to another object adds nothing."""
    record, known = held.record, _own(job, held.record, tier, report.host)
    report_record = CorruptionReport(
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
            raise Refused(f"{before.refuted_by} read {what}, and found no damage", hint=hint)
        if _open(known):
            latest = max(found, _found(known)) if same else _found(known)
            report_record = dataclasses.replace(
                before,
                generation=max(report.generation, before.generation),
                found_generation=latest[0],
                found_step=latest[1],
            )
        if before == report_record:
            return decide_confirm(job, held, tier)
    return _put(job, held, tier, report.host, report_record, f"found damage in step {record.step}")


def _note_unread(job: JobView, held: Entry[CheckpointRecord], tier: str, report: DamageReport) -> Decision:
    """Record, once, that `report.host` cannot read the reported object; its maintenance task retries."""
    if _own(job, held.record, tier, report.host) is not None:
        return decide_confirm(job, held, tier)
    report_record = CorruptionReport(corrupt=False, reason=report.reason[:MAX_REASON_CHARS])
    return _put(job, held, tier, report.host, report_record, f"could not read step {held.record.step}")


def _own(job: JobView, record: CheckpointRecord, tier: str, host: str) -> Entry[CorruptionReport] | None:
    key = job.keys.suspect(*record.where, tier, host)
    return job.view.entry(key, CorruptionReport)


def _put(
    job: JobView,
    held: Entry[CheckpointRecord],
    tier: str,
    host: str,
    report_record: CorruptionReport,
    what: str,
) -> Decision:
    record = held.record
    key = job.keys.suspect(*record.where, tier, host)
    return Decision(
        reason=f"{host} {what} on {tier}",
        txn=Txn(
            compares=(unchanged(held.key, held.mod_revision), unchanged(key, job.view.mod_revision(key))),
            success=(Put(key=key, value=encode(report_record)),),
        ),
    )


# -- confirmation -----------------------------------------------------------------------------


def decide_confirm(job: JobView, held: Entry[CheckpointRecord], tier: str) -> Decision:
    """Mark a copy as CORRUPT if enough hosts found it damaged; else the reason names a host that must still verify.

    Level-triggered: the leader also calls this function, because the second host may have departed for good.
    """
    record, state = held.record, tiers_of(held.record)[tier].state
    damage = [each for each in reports(job, record, tier) if each.record.corrupt]
    reported = next(filter(_open, damage), None)
    if reported is None or record.state is not CheckpointState.COMMITTED or state is not TierState.PRESENT:
        return Decision(reason=f"step {record.step} on {tier} is not suspected")
    second = next(
        (
            each
            for each in damage
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
            return Decision(reason=f"{what}: {others[0]} must verify it")
        # no other host could verify, no worker has registered since the view, and the reporting host is registered
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
    """Return the checkpoints up to `found`, newest first, that need objects of `record` on `tier`."""
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
    """Return a record with this copy CORRUPT; the record itself is CORRUPT if the copy was the last."""
    tiers = dict(tiers_of(record))
    tiers[tier] = dataclasses.replace(tiers[tier], state=TierState.CORRUPT)
    whole = any(each.state is TierState.PRESENT for each in tiers.values())
    state = record.state if whole else CheckpointState.CORRUPT
    return dataclasses.replace(record, state=state, tiers=tiers, reason=why[:MAX_REASON_CHARS])


def _others(job: JobView, host: str) -> list[str]:
    """Return the hosts that must verify before the report of `host` counts; empty: the report counts alone.

    If all members of the world are registered, these are the world's other hosts: standbys have no process that
    verifies. Otherwise all other registered hosts must verify. While `host` itself is not registered, every
    registered host must verify; if no host is registered, the next host that registers must verify.
    """
    registered, world = job.workers(), job.world()
    if all(worker.record.host != host for worker in registered):
        return sorted({worker.record.host for worker in registered} - {""}) or ["the next host"]
    places = {(member.worker, member.incarnation) for member in world.members} if world is not None else set()
    inside = [worker for worker in registered if (worker.name, worker.create_revision) in places]
    begun = bool(inside) and len(inside) == len(places)
    return sorted({worker.record.host for worker in (inside if begun else registered)} - {host, ""})


def next_confirmation(job: JobView) -> Decision:
    """Decide the first corruption report of this job that is confirmed but whose copy is not CORRUPT yet."""
    for entry in job.checkpoints():
        if entry.record.state is CheckpointState.COMMITTED:
            for tier in present_on(entry.record):
                decision = decide_confirm(job, entry, tier)
                if decision.txn is not None:
                    return decision
    return Decision(reason="nothing is confirmed to be damaged")
