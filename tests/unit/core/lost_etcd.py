"""A job after a loss of etcd: only an older backup of etcd and the storage are left."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from strata.core import invariants
from strata.core.checkpoints.attempt import uses
from strata.core.checkpoints.deletion import dying_tiers
from strata.core.checkpoints.tiers import tiers_of
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord, CheckpointState, Latest, TierState
from strata.core.kv.txn import Put, Txn
from strata.core.restore.control_plane import RestoredKeys, complete
from strata.core.restore.storage_evidence import Found, FoundCheckpoint
from tests.unit.core.checkpoint_job import ROOT
from tests.unit.core.keeping_job import KeptJob
from tests.unit.core.rig import JOB, KEYS, Store

WHY = "restored from the backup of yesterday"
Predecessor = tuple[int, int, str]


class LostJob(KeptJob):
    """A job that remembers each marker in storage; `found` returns the result of a search at this moment."""

    def __init__(self, *steps: int, **slots: int) -> None:
        self.predecessors: dict[str, Predecessor | None] = {}
        super().__init__(*steps, **slots)

    def commit(self) -> list[CheckpointRecord]:
        entry = self.store.job().latest()
        before = predecessor(entry.record if entry is not None else None)
        committed = super().commit()
        for record in committed:
            self.predecessors.setdefault(record.attempt, before)
        return committed

    def next_world_of_one(self) -> None:
        """End the generation: the only member dies, and registers again."""
        self.another_generation()

    def base(self) -> dict[str, bytes]:
        """Return the keys and values, as in a backup."""
        return {kv.key: kv.value for kv in self.store.view().walk("")}

    def found(self, *roots: str, **more: Any) -> Found:
        """Return the proof in storage: marker and bytes of each committed checkpoint, on each tier of its record."""
        searched = roots or (ROOT,)
        job = self.store.job()
        checkpoints = [
            checkpoint
            for entry in job.checkpoints()
            if entry.record.attempt in self.predecessors  # aborted attempts have no marker
            for checkpoint in copies_of(job, entry.record, searched, self.predecessors[entry.record.attempt])
        ]
        generations = {JOB.name: max((e.record.generation for e in job.checkpoints()), default=0)}
        return Found(
            **{
                "roots": searched,
                "listed": listed(*searched),
                "checkpoints": tuple(checkpoints),
                "generations": generations,
                **more,
            }
        )


def listed(*roots: str, job: str = JOB.name) -> frozenset[str]:
    """Return the folders of the job in these roots."""
    return frozenset(f"{root}/{job}" for root in roots)


def predecessor(latest: Latest | None) -> Predecessor | None:
    return (latest.step, latest.record_generation, latest.attempt) if latest is not None else None


def copies_of(
    job: JobView, record: CheckpointRecord, roots: Iterable[str], before: Predecessor | None
) -> Iterable[FoundCheckpoint]:
    if record.state not in {CheckpointState.COMMITTED, CheckpointState.DELETING} or record.origin is not None:
        return
    used = tuple(e.record.where for e in job.checkpoints() if uses(job, record, e.record))
    for name, tier in tiers_of(record).items():
        root = tier.path.rpartition("/")[0].rpartition("/")[0]
        if root in roots and (tier.state is TierState.PRESENT or name in dying_tiers(record)):
            yield found_of(record, root, job=job.keys.name, predecessor=before, uses=used)


def found_of(
    record: CheckpointRecord, root: str = ROOT, *, job: str = JOB.name, **more: Any
) -> FoundCheckpoint:
    fields = {
        "ranks": record.ranks,
        "epoch": record.epoch,
        "size_bytes": record.size_bytes,
        "model_hash": record.model_hash,
        "created_unix_ms": record.created_unix_ms,
        "metadata": record.metadata,
        "manifest_digest": record.manifest_digest or "m",
        **more,
    }
    return FoundCheckpoint(
        job=job,
        root=root,
        step=record.step,
        generation=record.generation,
        attempt=record.attempt,
        type=record.type,
        **fields,
    )


def restored(base: Mapping[str, bytes], found: Found, *, now_unix_ms: int = 7) -> tuple[RestoredKeys, Store]:
    """Complete a keyspace and load it into another etcd.

    Assert that it is sound and that a second completion changes nothing.
    """
    result = complete(KEYS, base, found, why=WHY, now_unix_ms=now_unix_ms)
    store = Store()
    for key, value in result.values.items():
        store.execute(Txn(success=(Put(key=key, value=value),)))
    assert invariants.check(store.view(), KEYS) == []
    again = complete(KEYS, result.values, found, why=WHY, now_unix_ms=now_unix_ms)
    written = {KEYS.job(job.name).history_of(job.generation) for job in (*result.jobs, *again.jobs)}
    written |= {KEYS.job(job.name).head for job in result.jobs}
    before, after = ({k: v for k, v in each.values.items() if k not in written} for each in (result, again))
    assert after == before
    return result, store


def only_job(result: RestoredKeys) -> Any:
    (job,) = result.jobs
    return job


def records(store: Store) -> dict[int, CheckpointRecord]:
    """Return the newest record of each step."""
    return {e.record.step: e.record for e in store.job().checkpoints()}


def states(store: Store) -> dict[int, str]:
    return {step: record.state.value for step, record in records(store).items()}


def at(found: Found, **changes: Any) -> Found:
    return dataclasses.replace(found, **changes)
