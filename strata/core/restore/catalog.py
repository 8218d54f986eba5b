"""Restore of one job's checkpoint catalog, completed from the evidence in storage roots (PROTOCOLS 9.3).

The result for a record depends on its copies in the searched roots (*marked*: with a COMMIT marker):

    record             its copies                                    result
    -----------------  --------------------------------------------  -----------------------------------------
    none               marked                                        COMMITTED, from the manifest
    OPEN, ABORTED      one of this attempt is marked                 COMMITTED
                       another attempt of the slot is marked         that attempt; this one is under `discarded/`
    OPEN               none is marked                                ABORTED
    COMMITTED,         one is whole, not searched or unread          unchanged; a missing copy is REMOVED
    CORRUPT            one is damaged, none is whole                 CORRUPT
                       none exists                                   removed, as by a deletion; CORRUPT if it is
                                                                     pinned, tagged, forked or used by another
    DELETING           any                                           unchanged: its bytes may go at any moment

The bytes of a tombstone may be removed at any later time (PROTOCOLS 4.6), so a restore must not revive a tombstone.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from strata.core.checkpoints.references import Discarded, Reference
from strata.core.checkpoints.tiers import PRIMARY, present_on, tiers_of
from strata.core.ids import AttemptId
from strata.core.kv.keys import JobKeys
from strata.core.kv.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    Tier,
    TierState,
    decode,
    encode,
)
from strata.core.restore.storage_evidence import Found, FoundCheckpoint, Seen, Slot
from strata.errors import QuotaExceeded

SECOND = "replica"
"""The tier name of a second root that no record names.

`CheckpointManager` uses the same name for its second storage.
"""

_ENDED = frozenset({CheckpointState.COMMITTED, CheckpointState.CORRUPT, CheckpointState.PREPARED})
_UNFINISHED = frozenset({CheckpointState.OPEN, CheckpointState.ABORTED})
_GOING = frozenset({TierState.DELETING, TierState.REMOVED})
MAX_REASON_CHARS = 500


@dataclass(kw_only=True)
class CatalogChanges:
    """The changes to a job's checkpoints; a checkpoint is (step, generation)."""

    adopted: list[tuple[int, int]] = field(default_factory=list)
    aborted: list[tuple[int, int]] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    corrupt: list[tuple[int, int]] = field(default_factory=list)
    fewer_copies: list[tuple[int, int]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    not_searched: set[str] = field(default_factory=set)
    """The storage roots that hold checkpoints of the job and were not searched."""


class JobValues:
    """The keys of a job and their values, with two indexes by attempt: the keys below it, and its references."""

    def __init__(self, job: JobKeys, values: Mapping[str, bytes]) -> None:
        self.values: dict[str, bytes] = {}
        self.below: defaultdict[Slot, set[str]] = defaultdict(set)
        """By attempt, the keys below its folder."""
        self.used_by: defaultdict[str, set[Slot]] = defaultdict(set)
        """By the attempt that refers, the attempts to which it refers."""
        self._job = job
        for key, value in values.items():
            self.put(key, value)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        if (where := self._attempt_of(key)) is not None:
            self.below[where].add(key)
            if key.startswith(self._job.refs(*where)):
                self.used_by[key.rpartition("/")[2]].add(where)

    def drop(self, key: str) -> None:
        if self.values.pop(key, None) is not None and (where := self._attempt_of(key)) is not None:
            self.below[where].discard(key)
            if key.startswith(self._job.refs(*where)):
                self.used_by[key.rpartition("/")[2]].discard(where)

    def in_folder(self, where: Slot, folder: str) -> list[str]:
        """Return the keys below an attempt that begin with `folder`."""
        return [key for key in self.below.get(where, ()) if key.startswith(folder)]

    def _attempt_of(self, key: str) -> Slot | None:
        if not key.startswith(self._job.checkpoints):
            return None
        parts = key.removeprefix(self._job.checkpoints).split("/")
        if len(parts) < 4 or not (parts[0].isdigit() and parts[1].isdigit()):
            return None
        return int(parts[0]), int(parts[1]), AttemptId(parts[2])


class Catalog:
    """The checkpoints of one job during the restore: `store` has all keys of the job, and is modified.

    `why` is the reason written to changed records. All values must be decodable records.
    """

    def __init__(self, job: JobKeys, store: JobValues, found: Found, *, why: str) -> None:
        self._job = job
        self._store = store
        self._found = found
        self._why = why
        self._marked = found.jobs.get(job.name, ())
        self.changes = CatalogChanges()
        self.records = dict(self._read())
        self._names = self._tier_names()
        self._has_past = bool(self.records)
        self._shared = self._shared_roots()

    def complete(self) -> CatalogChanges:
        """Update every record, adopt found checkpoints that have no record, and return the changes."""
        for slot, attempts in sorted(self._by_slot().items()):
            self._settle_slot(slot, attempts)
        for slot, record in sorted(self.records.items()):
            if record.state is CheckpointState.OPEN:
                self._abort(slot, record)
        self._refer()
        # newest first: an Incremental is judged before the records it uses
        judged = sorted(
            (record for record in self.records.values() if record.state in _ENDED),
            key=lambda record: (record.generation, record.step),
            reverse=True,
        )
        for record in judged:
            self._judge(record)
        return self.changes

    # -- reading

    def _read(self) -> Iterator[tuple[tuple[int, int], CheckpointRecord]]:
        for key, value in self._store.values.items():
            parts = key.removeprefix(self._job.checkpoints).split("/")
            if key.startswith(self._job.checkpoints) and len(parts) == 2:
                record = decode(CheckpointRecord, value)
                yield (record.step, record.generation), record

    def _tier_names(self) -> dict[str, str]:
        """Return the tier name of each searched root: the name in the records, else one by the order of the roots."""
        names: dict[str, str] = {}
        for record in self.records.values():
            for name, tier in tiers_of(record).items():
                root = self._found.root_of(tier.path)
                if root is not None and record.origin is None:
                    names.setdefault(root, name)
        free = (name for name in _names() if name not in names.values())
        for root in self._found.roots:
            if root not in names and any(each.root == root for each in self._marked):
                names[root] = next(free)
        return names

    def _by_slot(self) -> dict[tuple[int, int], dict[AttemptId, list[FoundCheckpoint]]]:
        """Return the marked checkpoints by slot and attempt, in the order of the roots."""
        slots: dict[tuple[int, int], dict[AttemptId, list[FoundCheckpoint]]] = {}
        for each in sorted(self._marked, key=lambda each: self._found.roots.index(each.root)):
            slots.setdefault((each.step, each.generation), {}).setdefault(each.attempt, []).append(each)
        return slots

    # -- one slot

    def _settle_slot(
        self, slot: tuple[int, int], attempts: Mapping[AttemptId, list[FoundCheckpoint]]
    ) -> None:
        """Write a COMMITTED record for a marked attempt into the slot."""
        record = self.records.get(slot)
        if record is not None and record.attempt in attempts:
            chosen = record.attempt
        elif record is not None and record.state in _ENDED and self._is_here(record):
            return self._warn_taken(slot, record.attempt, attempts)
        else:
            chosen = max(attempts, key=lambda attempt: (attempts[attempt][0].created_unix_ms, attempt))
        self._warn_taken(slot, chosen, attempts)
        copies = attempts[chosen]
        if record is None or record.attempt != chosen:
            self._adopt(slot, copies, replaces=record)
        elif record.state in _UNFINISHED:
            self._adopt(slot, copies, of=record)
        return None

    def _warn_taken(
        self, slot: tuple[int, int], holder: str, attempts: Mapping[AttemptId, list[FoundCheckpoint]]
    ) -> None:
        for attempt, copies in attempts.items():
            if attempt != holder:
                self.changes.warnings.append(
                    f"{_name(slot)} has two committed attempts: {holder} is restored, and not {copies[0].path}"
                )

    def _is_here(self, record: CheckpointRecord) -> bool:
        """Return whether a copy may exist: in a searched root, or in one that was not searched."""
        return any(
            tier.state not in _GOING and self._seen(tier, record)[0] is not Seen.ABSENT
            for tier in tiers_of(record).values()
        )

    def _adopt(
        self,
        slot: tuple[int, int],
        copies: list[FoundCheckpoint],
        *,
        of: CheckpointRecord | None = None,
        replaces: CheckpointRecord | None = None,
    ) -> None:
        first = copies[0]
        if going := self._tombstone_among(first.uses):
            warning = (
                f"{_name(slot)} is committed in storage and left out: it uses {going}, which is being deleted"
            )
            self.changes.warnings.append(warning)
            return
        base = max(first.uses, key=lambda use: (use[1], use[0]), default=None)
        reason = f"{self._why}: committed in storage"
        record = CheckpointRecord(
            attempt=first.attempt,
            step=first.step,
            generation=first.generation,
            type=first.type,
            state=CheckpointState.COMMITTED,
            ranks=first.ranks,
            path=of.path if of is not None else first.path,
            epoch=first.epoch,
            size_bytes=first.size_bytes,
            model_hash=first.model_hash,
            manifest_digest=first.manifest_digest,
            created_unix_ms=first.created_unix_ms,
            base_step=of.base_step if of is not None else base[0] if base is not None else None,
            base_attempt=of.base_attempt if of is not None else base[2] if base is not None else None,
            metadata=first.metadata,
            reason=reason if of is None or not of.reason else f"{reason}; {of.reason}"[:MAX_REASON_CHARS],
            tiers=tiers_of(of) if of is not None else {},
        )
        if replaces is not None:
            self._discard(replaces)
        self._put(self._fitting(self._with_copies(record, copies)))
        self.changes.adopted.append(slot)

    def _tombstone_among(self, uses: Iterable[tuple[int, int, AttemptId]]) -> str:
        for step, generation, attempt in uses:
            used = self.records.get((step, generation))
            if used is not None and used.attempt == attempt and used.state is CheckpointState.DELETING:
                return _name((step, generation))
        return ""

    def _with_copies(self, record: CheckpointRecord, copies: Iterable[FoundCheckpoint]) -> CheckpointRecord:
        """Return the record with further tiers: the copies with the record's manifest at paths that no tier of it has."""
        tiers = dict(record.tiers)
        paths = {tier.path for tier in tiers.values()}
        for copy in copies:
            if copy.manifest_digest != record.manifest_digest:
                self.changes.warnings.append(f"{copy.path} is left out: its manifest differs from its copy's")
            elif copy.path not in paths:
                name = self._names[copy.root]
                if name in tiers:
                    name = next(each for each in _names() if each not in tiers)
                tiers[name] = Tier(path=copy.path, shared=self._is_shared(copy.root))
        return dataclasses.replace(record, tiers=tiers)

    def _is_shared(self, root: str) -> bool:
        """Return whether a root survives the loss of a host, according to the records before the restore.

        A root that no record names may be on each host's own disk, so it counts as not shared. Exception: there is
        no record of this job at all. Then an operator has named the root so that the job continues from it. If this
        root counted as not shared, its checkpoints would never be restored.
        """
        if root in self._shared:
            return self._shared[root]
        if not root.startswith("file:") or not self._has_past:
            return True
        self._warn(
            f"no record names {root}: its copies count as local to one host, and no restore reads them"
        )
        return False

    def _shared_roots(self) -> dict[str, bool]:
        """Return, for roots that records name, whether hosts share them; False if any record denies it."""
        shared: dict[str, bool] = {}
        for record in self.records.values():
            for tier in tiers_of(record).values():
                if (root := self._found.root_of(tier.path)) is not None:
                    shared[root] = tier.shared and shared.get(root, True)
        return shared

    def _fitting(self, record: CheckpointRecord) -> CheckpointRecord:
        """Return the record, without its metadata if it would be too large for a value."""
        try:
            encode(record)
        except QuotaExceeded:
            where = _name((record.step, record.generation))
            self.changes.warnings.append(f"{where} loses its metadata, which is too large for a record")
            return dataclasses.replace(record, metadata={})
        return record

    def _discard(self, record: CheckpointRecord) -> None:
        """Remove an attempt whose slot another attempt has; note its bytes for removal, as a begin does."""
        self._forget_attempt(record)
        if record.state in _ENDED:
            return  # its bytes are already removed
        note = Discarded(step=record.step, generation=record.generation, tiers=tiers_of(record))
        self._store.put(self._job.discard(record.attempt), encode(note))

    def _abort(self, slot: tuple[int, int], record: CheckpointRecord) -> None:
        """Abort an OPEN attempt, as the leader does before a new world."""
        reason = f"{self._why}: this save had not ended"
        self._put(dataclasses.replace(record, state=CheckpointState.ABORTED, reason=reason))
        self._release(record)
        if all(tier.shared for tier in tiers_of(record).values()):
            self._drop(record, self._job.acks(*record.where))
        self.changes.aborted.append(slot)
        self._note_roots(record)

    # -- committed records

    def _seen(self, tier: Tier, record: CheckpointRecord) -> tuple[Seen, str]:
        """Return what is known of a copy. For a host's own disk, a search on another host proves only presence."""
        seen, why = self._found.seen(tier.path, record)
        return (seen, why) if tier.shared or seen is Seen.PROVEN else (Seen.NOT_SEARCHED, "")

    def _judge(self, record: CheckpointRecord) -> None:
        """Update a committed record by its copies in the searched roots."""
        slot = record.step, record.generation
        tiers, reasons = dict(tiers_of(record)), []
        for name, tier in tiers_of(record).items():
            if tier.state in _GOING:
                continue
            seen, why = self._seen(tier, record)
            if seen is Seen.NOT_SEARCHED and self._found.root_of(tier.path) is not None:
                self._warn(
                    f"{_above(tier.path)} is local to each host: copies not found here stay as recorded"
                )
            elif seen is Seen.NOT_SEARCHED:
                self.changes.not_searched.add(_above(tier.path))
            elif seen is Seen.UNREAD:
                self._warn_unread(f"{_name(slot)} on {name}", tier.path, why)
            elif seen is Seen.DAMAGED:
                tiers[name] = dataclasses.replace(tier, state=TierState.CORRUPT)
                reasons.append(f"{name}: {why}")
            elif seen is Seen.ABSENT:
                state = TierState.CORRUPT if self._used_on(record, name) else TierState.REMOVED
                tiers[name] = dataclasses.replace(tier, state=state)
                reasons.append(f"{name}: nothing of it is there")
        judged = dataclasses.replace(record, tiers=tiers)
        if record.origin is None:
            copies = [each for each in self._marked if each.where == record.where]
            judged = self._with_copies(judged, copies)
        self._end(record, judged, "; ".join(reasons))

    def _warn_unread(self, which: str, path: str, why: str) -> None:
        """Warn about a folder that was not read: the checkpoint's own, or its job's (once)."""
        folder = path.rpartition("/")[0]
        whole = path not in self._found.unread
        subject = f"{folder} is not read, so its checkpoints are" if whole else f"{which} is"
        self._warn(f"{subject} kept as recorded: {why}")

    def _warn(self, warning: str) -> None:
        """Add a warning, once."""
        if warning not in self.changes.warnings:
            self.changes.warnings.append(warning)

    def _end(self, before: CheckpointRecord, judged: CheckpointRecord, why: str) -> None:
        slot, states = (before.step, before.generation), {tier.state for tier in judged.tiers.values()}
        if TierState.PRESENT in states:
            if before.state is CheckpointState.CORRUPT and set(present_on(judged)) - set(present_on(before)):
                self.changes.adopted.append(slot)
                judged = dataclasses.replace(judged, state=CheckpointState.COMMITTED)
            elif set(present_on(before)) - set(present_on(judged)):
                self.changes.fewer_copies.append(slot)
            if judged.tiers != tiers_of(before) or judged.state is not before.state:
                self._put(judged)
                self._drop_removed(judged)
            return
        if states <= {TierState.REMOVED} and not self._is_kept(judged):
            self.forget(judged)
            self.changes.lost.append(slot)
            return
        if states <= _GOING and TierState.DELETING in states and not self._is_kept(judged):
            self._put(dataclasses.replace(judged, state=CheckpointState.DELETING))
            self.changes.lost.append(slot)
            return
        if before.state is CheckpointState.CORRUPT:
            return
        self.mark_corrupt(judged, why or "no copy of it is left")

    def mark_corrupt(self, record: CheckpointRecord, why: str) -> None:
        """Mark a record without a readable copy as CORRUPT, with this reason: no world begins from it."""
        reason = f"{self._why}: {why}"[:MAX_REASON_CHARS]
        self._put(dataclasses.replace(record, state=CheckpointState.CORRUPT, reason=reason))
        self.changes.corrupt.append((record.step, record.generation))

    def _is_kept(self, record: CheckpointRecord) -> bool:
        """Return whether a deletion would be refused: the record is pinned, tagged, forked, or used by another one."""
        folders = (self._job.refs(*record.where), self._job.tags_of(*record.where))
        pinned = self._job.pin(record.step, record.attempt) in self._store.values
        return pinned or any(self._store.in_folder(record.where, folder) for folder in folders)

    def _used_on(self, record: CheckpointRecord, name: str) -> bool:
        """Return whether a record that is readable on this tier uses this one."""
        refs = self._store.in_folder(record.where, self._job.refs(*record.where))
        users = (decode(Reference, self._store.values[key]) for key in refs)
        found = (self.records.get((user.step, user.generation)) for user in users if not user.job)
        return any(user is not None and name in present_on(user) for user in found)

    def forget(self, record: CheckpointRecord) -> None:
        """Remove a record and its keys, as a deletion does."""
        self._forget_attempt(record)
        self._store.drop(self._job.checkpoint(record.step, record.generation))
        self.records.pop((record.step, record.generation), None)

    def _drop_removed(self, record: CheckpointRecord) -> None:
        for name, tier in record.tiers.items():
            if tier.state is TierState.REMOVED:
                for folder in (self._job.copies, self._job.removed, self._job.suspects):
                    self._drop(record, folder(*record.where, name))

    # -- references

    def _refer(self) -> None:
        """Write the references of adopted Incrementals, as a begin does: to the bases, and to the attempts that these use."""
        uses = {each.where: each.uses for each in self._marked}
        self._by_step: defaultdict[int, list[CheckpointRecord]] = defaultdict(list)
        for record in self.records.values():
            self._by_step[record.step].append(record)
        for slot in sorted(self.changes.adopted, key=lambda slot: (slot[1], slot[0])):
            record = self.records[slot]
            if record.type is not CheckpointType.INCREMENTAL:
                continue
            named = [(step, attempt) for step, _generation, attempt in uses.get(record.where, ())]
            if record.base_step is not None and record.base_attempt is not None:
                named.append((record.base_step, record.base_attempt))
            direct = {used.where for step, attempt in named for used in self._at(step, attempt)}
            needed = direct.union(*(self._store.used_by[where[2]] for where in direct)) - {record.where}
            reference = encode(Reference(step=record.step, generation=record.generation))
            for where in needed:
                used = self.records.get(where[:2])
                if used is not None and used.where == where and used.state in _ENDED:
                    self._store.put(self._job.refs(*where) + record.attempt, reference)

    def _at(self, step: int, attempt: str) -> list[CheckpointRecord]:
        return [record for record in self._by_step[step] if record.attempt == attempt]

    def _release(self, record: CheckpointRecord) -> None:
        for where in list(self._store.used_by[record.attempt]):
            self._store.drop(self._job.refs(*where) + record.attempt)

    # -- writing

    def _put(self, record: CheckpointRecord) -> None:
        self.records[record.step, record.generation] = record
        self._store.put(self._job.checkpoint(record.step, record.generation), encode(record))

    def _forget_attempt(self, record: CheckpointRecord) -> None:
        """Remove all keys that belong to a record, and its tags and pin."""
        for key in self._store.in_folder(record.where, self._job.tags_of(*record.where)):
            self._store.drop(self._job.tag(key.rpartition("/")[2]))
        self._store.drop(self._job.pin(record.step, record.attempt))
        self._drop(record, self._job.attempt(*record.where))
        self._release(record)

    def _drop(self, record: CheckpointRecord, folder: str) -> None:
        for key in self._store.in_folder(record.where, folder):
            self._store.drop(key)

    def _note_roots(self, record: CheckpointRecord) -> None:
        for tier in tiers_of(record).values():
            if self._found.root_of(tier.path) is None:
                self.changes.not_searched.add(_above(tier.path))


def _names() -> Iterator[str]:
    yield from (PRIMARY, SECOND)
    number = 3
    while True:
        yield f"storage-{number}"
        number += 1


def _above(path: str) -> str:
    """Return the storage root of a checkpoint's folder."""
    return path.rpartition("/")[0].rpartition("/")[0]


def _name(slot: tuple[int, int]) -> str:
    return f"step {slot[0]} of generation {slot[1]}"
