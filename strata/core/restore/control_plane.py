"""Restore of a cluster's keys after etcd was lost: from a backup, or built from storage (PROTOCOLS 9.2).

A restore and a rebuild are one function, `complete(base, found)`. `base` holds the keys from before the loss: from
a backup, from an older snapshot that etcd already holds, or none. `found` is the evidence in the storage roots.
This module reads no clock, storage or etcd.

1. Keys about processes are dropped: leader, replicas, members, worlds, barriers, readers, rewinds.
2. `core.restore.catalog` completes the catalog.
3. A job that had a world, or has checkpoints in storage, gets a forming world. The generation of this world is
   above every generation that any key or folder names; far above if one of the job's roots was not searched. The
   epoch in every record is set to 0, because the old epochs may be above the new etcd's revisions.
4. A phase that ends a job is dropped if storage has checkpoints of a later generation than the head's: the job went on.
5. `latest` names the newest checkpoint that is left. If a job had a `latest` and no checkpoint is left, the record
   that `latest` named stays, as CORRUPT. The job's next world then fails, instead of beginning without a
   checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strata.core.checkpoints.deletion import fork_reference
from strata.core.checkpoints.order import RESTORABLE_TYPES, is_latest, newest
from strata.core.checkpoints.references import CorruptionReport, Discarded
from strata.core.checkpoints.tiers import tiers_of
from strata.core.job import JobView
from strata.core.key_kinds import PROCESSES, UNKNOWN, kind_of
from strata.core.kv.keys import ClusterKeys, JobKeys
from strata.core.kv.records import (
    Anew,
    Assignment,
    CheckpointRecord,
    CheckpointState,
    GenerationRecord,
    JobPhase,
    Latest,
    Phase,
    PoisonRecord,
    Restored,
    WorldHead,
    decode,
    encode,
)
from strata.core.kv.txn import KeyValue
from strata.core.kv.view import View
from strata.core.restore.catalog import Catalog, CatalogChanges, JobValues
from strata.core.restore.storage_evidence import MAX_GENERATION, Found, FoundCheckpoint
from strata.errors import InvalidArgument

UNSEARCHED_GENERATIONS: Final = 1000
"""How many generations are skipped if a root of a job was not searched.

The job may have gone on after the backup, and saved in generations that no key and no searched folder names. A
reused generation has slots whose folders already exist, from other attempts. No job begins a thousand worlds
between two backups.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredJob:
    """The result for one job; `generation` is 0 if the job has no world. Slots are (step, generation)."""

    name: str
    generation_before: int
    generation: int
    latest_before: Latest | None
    latest: Latest | None
    in_base: bool
    changes: CatalogChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredKeys:
    """All keys below `P/jobs/` after the restore, and the result for each job."""

    values: Mapping[str, bytes]
    jobs: tuple[RestoredJob, ...]


def complete(
    keys: ClusterKeys, base: Mapping[str, bytes], found: Found, *, why: str, now_unix_ms: int
) -> RestoredKeys:
    """Return the keys that follow from those of the past and from the evidence in storage.

    `base` may have keys of the whole cluster; keys outside of `P/jobs/` are left out. `why`, such as "restored from
    the backup of …", is the reason in every written record. Applied to its own result, this function changes only
    the generations.
    """
    by_job: dict[str, dict[str, bytes]] = {name: {} for name in found.jobs}
    for key, value in base.items():
        name = keys.job_of(key)
        if name is not None:
            by_job.setdefault(name, {})[key] = value
    values: dict[str, bytes] = {}
    jobs = []
    for name in sorted(by_job):
        try:
            job_keys = keys.job(name)
        except InvalidArgument:
            continue  # no job can have this name
        job = _Job(job_keys, by_job[name], found, why=why, now_unix_ms=now_unix_ms)
        jobs.append(job.complete())
        values |= job.store.values
    _drop_dangling_forks(keys, values)
    return RestoredKeys(values=values, jobs=tuple(jobs))


def _drop_dangling_forks(keys: ClusterKeys, values: dict[str, bytes]) -> None:
    """Remove references that keep a checkpoint for a fork that does not exist any more."""
    view = _view(values)
    needed = {
        fork_reference(job, entry.record)
        for job in (JobView(view, keys.job(name)) for name in view.names(keys.jobs))
        for entry in job.checkpoints()
        if entry.record.origin is not None
    }
    for key in [key for key in values if "/refs/fork:" in key and key not in needed]:
        del values[key]


class _Job:
    """One job during the restore."""

    def __init__(
        self, job: JobKeys, base: Mapping[str, bytes], found: Found, *, why: str, now_unix_ms: int
    ) -> None:
        self._job = job
        self._found = found
        self._why = why
        self._now_unix_ms = now_unix_ms
        self._base = base
        self._warnings: list[str] = []
        self.store = JobValues(job, dict(self._kept()))
        self._head: WorldHead | None = self._decoded(WorldHead, job.head)
        self._latest_before: Latest | None = self._decoded(Latest, job.latest)

    def complete(self) -> RestoredJob:
        before = self._head.generation if self._head is not None else 0
        generation = self._next_generation()
        catalog = Catalog(self._job, self.store, self._found, why=self._why)
        changes = catalog.complete()
        changes.warnings[:0] = self._warnings
        self._drop_phase(catalog, before)
        self._derive_order(catalog, before)
        lost = self._latest_record(catalog)
        latest = self._choose_latest(catalog, lost)
        self._qualify()
        if generation:
            self._begin(generation, catalog)
        return RestoredJob(
            name=self._job.name,
            generation_before=before,
            generation=generation,
            latest_before=self._latest_before,
            latest=latest,
            in_base=bool(self._base),
            changes=changes,
        )

    # -- kept keys of the past

    def _kept(self) -> Iterable[tuple[str, bytes]]:
        for key, value in self._base.items():
            kind = kind_of(key, self._job.root)
            if kind is PROCESSES:
                continue
            if kind is UNKNOWN or self._readable(kind, key, value):
                yield key, value

    def _readable(self, kind: type[Any], key: str, value: bytes) -> bool:
        try:
            record = decode(kind, value)
        except PoisonRecord as error:
            self._warnings.append(f"{key} is left out: {error.message}")
            return False
        if isinstance(record, CheckpointRecord) and not self._lies_right(key, record):
            self._warnings.append(f"{key} is left out: it holds step {record.step} of {record.generation}")
            return False
        return True

    def _lies_right(self, key: str, record: CheckpointRecord) -> bool:
        try:
            self._job.attempt(*record.where)
            return key == self._job.checkpoint(record.step, record.generation)
        except InvalidArgument:
            return False

    def _decoded(self, kind: type[Any], key: str) -> Any:
        """Return the record that a key had before the restore; None if there is none, or if it does not decode."""
        try:
            return decode(kind, self._base[key]) if key in self._base else None
        except PoisonRecord:
            return None

    # -- the generation

    def _next_generation(self) -> int:
        """Return a generation above all that any key or folder names, or may name; 0 for a job without a generation."""
        greatest = max(self._generations(), default=0)
        if self._head is None and not greatest:
            return 0
        return greatest + (1 if self._is_searched() else UNSEARCHED_GENERATIONS)

    def _is_searched(self) -> bool:
        """Return whether every folder that the job may have saved into was listed."""
        folders = {folder for folder in self._found.listed if folder.rpartition("/")[2] == self._job.name}
        for key in self._base:
            if kind_of(key, self._job.root) is not CheckpointRecord:
                continue
            record = self._decoded(CheckpointRecord, key)
            for tier in tiers_of(record).values() if record is not None else ():
                root = tier.path.rpartition("/")[0].rpartition("/")[0]
                if not tier.shared or f"{root}/{self._job.name}" not in folders:
                    return False
        return bool(folders)

    def _generations(self) -> Iterable[int]:
        yield self._found.generations.get(self._job.name, 0)
        yield from (each.generation for each in self._found.jobs.get(self._job.name, ()))
        for key in self._base:
            folder, _, rest = key.removeprefix(self._job.root).partition("/")
            numbered = rest.partition("/")[0] if folder in {"worlds", "history"} else ""
            if folder == "checkpoints":
                numbered = rest.split("/")[1] if "/" in rest else ""
            if numbered.isascii() and numbered.isdigit() and int(numbered) <= MAX_GENERATION:
                yield int(numbered)
            kind = kind_of(key, self._job.root)
            record = self._decoded(kind, key) if kind in {Latest, Anew, Assignment, Discarded} else None
            yield getattr(record, "generation", 0)
        if self._head is not None:
            yield self._head.generation

    # -- the phase

    def _drop_phase(self, catalog: Catalog, head_generation: int) -> None:
        """Set a done, failed or paused job to RUNNING if the job has since saved in a later generation.

        With its old phase the job could not continue. The record keeps the newest attempt at the job.
        """
        phase = self._decoded(JobPhase, self._job.phase)
        went_on = any(each.generation > head_generation for each in self._found.jobs.get(self._job.name, ()))
        if phase is None or phase.phase is Phase.RUNNING or not went_on:
            return
        catalog.changes.warnings.append(
            f"it was {phase.phase.value}, and storage has checkpoints of a later generation: it runs"
        )
        reason = f"{self._why}: the job had continued"
        running = JobPhase(phase=Phase.RUNNING, reason=reason, epoch=0, attempt=phase.attempt)
        self.store.put(self._job.phase, encode(running))

    # -- the order of checkpoints

    def _derive_order(self, catalog: Catalog, head_generation: int) -> None:
        """For worlds of which only storage has evidence, write the `restored` and `anew` keys that their heads wrote.

        The first checkpoint of a generation names a predecessor: the checkpoint from which its world began. The
        checkpoint names none if the job began again from nothing. If retention removed that first checkpoint, this
        information is lost.
        """
        whole = [
            each
            for each in self._found.jobs.get(self._job.name, ())
            if each.type in RESTORABLE_TYPES and each.generation > head_generation and _is_in(catalog, each)
        ]
        first: dict[int, FoundCheckpoint] = {}
        for each in sorted(whole, key=lambda each: each.step):
            first.setdefault(each.generation, each)
        anew = self._decoded(Anew, self._job.anew)
        given_up = anew.generation if anew is not None else -1
        for generation, each in sorted(first.items()):
            key = self._job.restored(generation)
            if each.predecessor is not None and each.predecessor[1] < generation:
                if key not in self.store.values:
                    self.store.put(key, encode(Restored(step=each.predecessor[0])))
            elif (
                each.predecessor is not None
                and key not in self.store.values
                and self._has_older(catalog, generation)
            ):
                catalog.changes.warnings.append(
                    f"generation {generation} began from an unknown checkpoint; its first checkpoint that is left is step"
                    f" {each.step}, and the checkpoints that it gave up count again"
                )
            elif each.predecessor is None and self._has_older(catalog, generation):
                given_up = max(given_up, generation - 1)
        if given_up >= 0 and (anew is None or given_up > anew.generation):
            self.store.put(self._job.anew, encode(Anew(generation=given_up)))

    def _has_older(self, catalog: Catalog, generation: int) -> bool:
        return any(
            record.generation < generation
            and record.state is CheckpointState.COMMITTED
            and record.type in RESTORABLE_TYPES
            for record in catalog.records.values()
        )

    def _latest_record(self, catalog: Catalog) -> CheckpointRecord | None:
        """Return the record that `latest` named before the restore, if the restore has removed it; else None."""
        latest = self._latest_before
        if latest is None or (latest.step, latest.record_generation) in catalog.records:
            return None
        record = self._decoded(CheckpointRecord, self._job.checkpoint(latest.step, latest.record_generation))
        return record if record is not None and record.attempt == latest.attempt else None

    def _choose_latest(self, catalog: Catalog, lost: CheckpointRecord | None) -> Latest | None:
        before = self._latest_before
        job = JobView(_view(self.store.values), self._job)
        if before is not None and (held := job.checkpoint(before.step, before.record_generation)) is not None:
            if held.record.attempt != before.attempt or held.record.state is not CheckpointState.COMMITTED:
                self.store.drop(self._job.latest)  # it may name a checkpoint of another history
                job = JobView(_view(self.store.values), self._job)
        elif before is not None:
            self.store.drop(self._job.latest)
            job = JobView(_view(self.store.values), self._job)
        entry, chosen = newest(job), None
        if entry is not None and is_latest(job, entry.record):
            chosen = before
        elif entry is not None:
            record = entry.record
            chosen = Latest(
                generation=record.generation,
                step=record.step,
                attempt=record.attempt,
                record_generation=record.generation,
            )
        elif before is not None:
            chosen = self._kept_as_corrupt(catalog, before, lost)
        if chosen is not None:
            self.store.put(self._job.latest, encode(chosen))
        return chosen

    def _kept_as_corrupt(
        self, catalog: Catalog, before: Latest, lost: CheckpointRecord | None
    ) -> Latest | None:
        """Return the old `latest` if its checkpoint stays as CORRUPT, so that no world begins without a checkpoint."""
        if lost is not None:
            catalog.changes.lost.remove((lost.step, lost.generation))
            catalog.mark_corrupt(lost, "nothing of it is there, and no other checkpoint is left")
            return before
        record = catalog.records.get((before.step, before.record_generation))
        usable = record is not None and record.attempt == before.attempt
        return before if usable and record is not None and record.state is CheckpointState.CORRUPT else None

    # -- values that belong to the lost etcd

    def _qualify(self) -> None:
        """Set the old epochs and incarnations in all records to 0: they are revisions of another etcd."""
        for key, value in list(self.store.values.items()):
            kind = kind_of(key, self._job.root)
            if kind in {JobPhase, Assignment}:
                self.store.put(key, encode(dataclasses.replace(decode(kind, value), epoch=0)))
            elif kind is CorruptionReport:
                self.store.put(
                    key, encode(dataclasses.replace(decode(CorruptionReport, value), incarnation=0))
                )

    def _begin(self, generation: int, catalog: Catalog) -> None:
        """Write the forming world that ends all earlier worlds."""
        head = self._head
        forming = WorldHead(
            generation=generation,
            epoch=0,
            members=0,
            size=0,
            reason=f"the control plane was {self._why}",
            no_progress=head.no_progress if head is not None else 0,
            failures=head.failures if head is not None else 0,
            began=bool(catalog.records) or (head is not None and (head.began or head.members > 0)),
        )
        line = GenerationRecord(
            epoch=0, members=0, size=0, reason=forming.reason, began_unix_ms=self._now_unix_ms
        )
        self.store.put(self._job.head, encode(forming))
        self.store.put(self._job.history_of(generation), encode(line))


def _is_in(catalog: Catalog, each: FoundCheckpoint) -> bool:
    record = catalog.records.get((each.step, each.generation))
    return record is not None and record.attempt == each.attempt


def _view(values: Mapping[str, bytes]) -> View:
    """Return a view of these keys, as if one transaction had written them."""
    view = View()
    view.reset(
        1,
        (
            KeyValue(key=key, value=value, create_revision=1, mod_revision=1, version=1)
            for key, value in values.items()
        ),
    )
    return view
