"""The checkpoint catalog of a job, and the job's datasets."""

from __future__ import annotations

from typing import Final

from strata.core.checkpoints.corruption import reported_tiers
from strata.core.checkpoints.lifecycle import acked, is_latest, newest
from strata.core.checkpoints.pins import tags_of
from strata.core.checkpoints.tiers import tiers_of
from strata.core.datasets.assignment import shards_of
from strata.core.datasets.cursors import cursors_of
from strata.core.job import JobView
from strata.core.kv.records import Assignment, CheckpointRecord, CheckpointState, DatasetSpec
from strata.core.kv.view import Entry
from strata.core.words import ranks_text
from strata.dashboard.api import model
from strata.dashboard.source import Source

PAGE: Final = 100


def checkpoints(source: Source, name: str, *, page_token: str = "") -> model.Checkpoints:
    """Return a page of a job's catalog, the newest first."""
    job = JobView(source.view, source.keys.job(name))
    entries = sorted(job.checkpoints(), key=_order, reverse=True)
    rest = [entry for entry in entries if not page_token or _token(entry) < page_token]
    return model.Checkpoints(
        checkpoints=tuple(checkpoint(job, entry) for entry in rest[:PAGE]),
        total=len(entries),
        next_page_token=_token(rest[PAGE - 1]) if len(rest) > PAGE else "",
    )


def _order(entry: Entry[CheckpointRecord]) -> tuple[int, int]:
    return entry.record.generation, entry.record.step


def _token(entry: Entry[CheckpointRecord]) -> str:
    return f"{entry.record.generation:020d}/{entry.record.step:020d}"


def checkpoint(job: JobView, entry: Entry[CheckpointRecord]) -> model.Checkpoint:
    """Return a record of the catalog with its acks, copies, pin, tags and readers."""
    record = entry.record
    acks = acked(job, record)
    is_open = record.state in (CheckpointState.OPEN, CheckpointState.PREPARED)
    return model.Checkpoint(
        step=record.step,
        attempt=record.attempt,
        generation=record.generation,
        epoch=record.epoch,
        type=record.type.value,
        state=record.state.value,
        acked=len(acks),
        ranks=record.ranks,
        missing_ranks=ranks_text(set(range(record.ranks)) - acks) if is_open else "",
        size_bytes=record.size_bytes,
        created_unix_ms=record.created_unix_ms,
        path=record.path,
        reason=record.reason,
        latest=is_latest(job, record),
        pinned=job.view.get(job.keys.pin(record.step, record.attempt)) is not None,
        tags=tuple(tags_of(job, record)),
        base_step=record.base_step,
        copies=tuple(
            model.Copy(tier=tier, path=copy.path, state=copy.state.value, shared=copy.shared)
            for tier, copy in sorted(tiers_of(record).items())
        ),
        origin_job=record.origin.job if record.origin is not None else "",
        references=job.view.count(job.keys.refs(*record.where)),
        readers=job.view.count(job.keys.readers(*record.where)),
        suspected=tuple(reported_tiers(job, record)),
    )


def datasets(source: Source, name: str) -> model.Datasets:
    """Return how many shards of each dataset each member owns, and the sample cursors of the latest checkpoint."""
    job = JobView(source.view, source.keys.job(name))
    latest = newest(job)
    found = []
    for dataset in job.view.names(job.keys.datasets):
        spec = job.view.record(job.keys.dataset_spec(dataset), DatasetSpec)
        if spec is not None:
            assignment = job.view.record(job.keys.assignment(dataset), Assignment)
            found.append(_dataset(dataset, spec, assignment))
    cursors = tuple(
        model.Cursor(
            dataset=each.dataset,
            step=latest.record.step,
            epoch=each.epoch,
            samples=each.samples,
            length=each.length or None,
            order=each.order,
        )
        for each in (cursors_of(latest.record.metadata) if latest is not None else ())
        if latest is not None
    )
    return model.Datasets(datasets=tuple(found), cursors=cursors)


def _dataset(name: str, spec: DatasetSpec, assignment: Assignment | None) -> model.Dataset:
    owned = shards_of(assignment) if assignment is not None else {}
    return model.Dataset(
        name=name,
        shards=spec.shards,
        uri=spec.uri,
        assignment_version=assignment.assign_epoch if assignment is not None else 0,
        generation=assignment.generation if assignment is not None else 0,
        owned={worker: len(shards) for worker, shards in sorted(owned.items())},
        moved=sum(map(len, assignment.moved.values())) if assignment is not None else 0,
    )
