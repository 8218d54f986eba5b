"""Datasets and shard assignments, as messages and records."""

from __future__ import annotations

from strata.core.datasets.cursors import cursors_of
from strata.core.job import JobView
from strata.core.kv.records import Assignment, DatasetSpec
from strata.v1 import datasets_pb2


def dataset_message(name: str, spec: DatasetSpec) -> datasets_pb2.Dataset:
    return datasets_pb2.Dataset(name=name, shards=spec.shards, uri=spec.uri, metadata=spec.metadata)


def dataset_spec(message: datasets_pb2.Dataset) -> DatasetSpec:
    return DatasetSpec(shards=message.shards, uri=message.uri, metadata=dict(message.metadata))


def assignment_message(
    name: str, spec: DatasetSpec, assignment: Assignment
) -> datasets_pb2.GetAssignmentResponse:
    """Return an assignment without its workers and their shards."""
    return datasets_pb2.GetAssignmentResponse(
        dataset=dataset_message(name, spec),
        assign_epoch=assignment.assign_epoch,
        generation=assignment.generation,
        ring=assignment.ring,
    )


def cursor_messages(job: JobView) -> list[datasets_pb2.SampleCursor]:
    """Return the sample cursors in the job's latest checkpoint."""
    latest = job.latest()
    entry = job.checkpoint(latest.record.step, latest.record.generation) if latest is not None else None
    if entry is None:
        return []
    return [
        datasets_pb2.SampleCursor(
            dataset=cursor.dataset,
            step=entry.record.step,
            epoch=cursor.epoch,
            samples=cursor.samples,
            length=cursor.length,
            order=cursor.order,
            seed=cursor.seed,
        )
        for cursor in cursors_of(entry.record.metadata)
    ]
