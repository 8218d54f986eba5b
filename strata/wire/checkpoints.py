"""The catalog: records as messages, requests as what the decisions take."""

from __future__ import annotations

from strata.core.checkpoints import AckRequest, Author, BeginRequest, SealRequest, acked, is_latest, sealed
from strata.core.ids import AttemptId, WorkerId
from strata.core.job import JobView
from strata.core.records import CheckpointRecord
from strata.core.view import Entry
from strata.v1 import checkpoints_pb2
from strata.wire.enums import CHECKPOINT_STATES, CHECKPOINT_TYPES, from_wire


def checkpoint_message(job: JobView, entry: Entry[CheckpointRecord]) -> checkpoints_pb2.Checkpoint:
    """Return a record with what lies around it: its acks, its pin, whether it is the latest."""
    record = entry.record
    latest = job.latest()
    return checkpoints_pb2.Checkpoint(
        attempt=record.attempt,
        step=record.step,
        generation=record.generation,
        type=CHECKPOINT_TYPES[record.type],
        state=CHECKPOINT_STATES[record.state],
        ranks=record.ranks,
        acked=sorted(acked(job, record)),
        sealed=sealed(job, record) is not None,
        path=record.path,
        epoch=record.epoch,
        size_bytes=record.size_bytes,
        model_hash=record.model_hash,
        manifest_digest=record.manifest_digest,
        created_unix_ms=record.created_unix_ms,
        metadata=record.metadata,
        reason=record.reason,
        latest=is_latest(latest.record if latest is not None else None, record),
        pinned=job.view.get(job.keys.pin(record.step, record.attempt)) is not None,
        base_step=record.base_step or 0,
        base_attempt=record.base_attempt or "",
        mod_revision=entry.mod_revision,
    )


def author(message: checkpoints_pb2.Author) -> Author:
    return Author(
        worker=WorkerId(message.worker_id),
        incarnation=message.incarnation,
        generation=message.generation,
        rank=message.rank,
    )


def begin_request(message: checkpoints_pb2.BeginCheckpointRequest) -> BeginRequest:
    """`InvalidArgument` for a type that this version does not know."""
    has_base = bool(message.base_attempt)
    return BeginRequest(
        author=author(message.author),
        step=message.step,
        type=from_wire(CHECKPOINT_TYPES, message.type),
        root=message.root,
        attempt=AttemptId(message.attempt),
        epoch=message.epoch,
        metadata=dict(message.metadata),
        base_step=message.base_step if has_base else None,
        base_attempt=AttemptId(message.base_attempt) if has_base else None,
        replaces=message.replaces,
    )


def ack_request(message: checkpoints_pb2.AckCheckpointRequest) -> AckRequest:
    return AckRequest(
        author=author(message.author),
        step=message.step,
        attempt=message.attempt,
        digest=message.digest,
        size_bytes=message.size_bytes,
    )


def seal_request(message: checkpoints_pb2.SealCheckpointRequest) -> SealRequest:
    return SealRequest(
        author=author(message.author),
        step=message.step,
        attempt=message.attempt,
        digest=message.manifest_digest,
        size_bytes=message.size_bytes,
        model_hash=message.model_hash,
    )
