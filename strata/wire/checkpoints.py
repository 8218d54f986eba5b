"""The checkpoint catalog: records as messages, requests as core values."""

from __future__ import annotations

from itertools import islice
from typing import Final

from strata.core.checkpoints.copies import CopyRequest
from strata.core.checkpoints.corruption import DamageReport, report_texts, reported_tiers
from strata.core.checkpoints.lifecycle import (
    AckRequest,
    Author,
    BeginRequest,
    SealRequest,
    acked,
    is_latest,
    sealed,
)
from strata.core.checkpoints.maintenance import AdoptRequest, MaintenanceTask
from strata.core.checkpoints.pins import tags_of
from strata.core.checkpoints.references import Keep, Retention
from strata.core.checkpoints.tiers import PRIMARY, tiers_of
from strata.core.ids import AttemptId, WorkerId
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord
from strata.core.kv.view import Entry
from strata.v1 import checkpoints_pb2, common_pb2, retention_pb2
from strata.wire.enums import CHECKPOINT_STATES, CHECKPOINT_TYPES, TASKS, TIER_STATES, from_wire

SHOWN: Final = 100
"""The most users and readers of a checkpoint that are shown; a checkpoint may have any number."""
REPORTS: Final = 16
REPORT_CHARS: Final = 200
"""`REPORTS` is the most corruption reports that are shown for a checkpoint, `REPORT_CHARS` the most characters of
each."""


def checkpoint_message(job: JobView, entry: Entry[CheckpointRecord]) -> checkpoints_pb2.Checkpoint:
    """Return a record with its related keys: its acks, its pin, whether it is the latest."""
    record = entry.record
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
        latest=is_latest(job, record),
        pinned=job.view.get(job.keys.pin(record.step, record.attempt)) is not None,
        base_step=record.base_step or 0,
        base_attempt=record.base_attempt or "",
        mod_revision=entry.mod_revision,
        tiers=tier_messages(record),
        tags=tags_of(job, record),
        references=job.view.names(job.keys.refs(*record.where))[:SHOWN],
        readers=job.view.names(job.keys.readers(*record.where))[:SHOWN],
        suspected=reported_tiers(job, record),
        origin_job=record.origin.job if record.origin is not None else "",
    )


def checkpoint_with_reports(job: JobView, entry: Entry[CheckpointRecord]) -> checkpoints_pb2.Checkpoint:
    """Return a checkpoint with a few corruption reports of hosts, each shortened.

    For single requests only. Pushes to every member of a job omit the reports: if a thousand hosts cannot read
    from a storage, each new report would send a full message to all of them.
    """
    message = checkpoint_message(job, entry)
    message.corruption_reports.extend(
        each if len(each) <= REPORT_CHARS else f"{each[: REPORT_CHARS - 1]}…"
        for each in islice(report_texts(job, entry.record), REPORTS)
    )
    return message


def tier_messages(record: CheckpointRecord) -> list[checkpoints_pb2.Tier]:
    """Return the copies of a checkpoint; the copy at the checkpoint's path comes first."""
    tiers = sorted(tiers_of(record).items(), key=lambda item: (item[1].path != record.path, item[0]))
    return [
        checkpoints_pb2.Tier(name=name, path=tier.path, state=TIER_STATES[tier.state], shared=tier.shared)
        for name, tier in tiers
    ]


def author(message: common_pb2.Author) -> Author:
    return Author(
        worker=WorkerId(message.worker_id),
        incarnation=message.incarnation,
        generation=message.generation,
        rank=message.rank,
    )


def begin_request(message: checkpoints_pb2.BeginCheckpointRequest) -> BeginRequest:
    """Return the core request; `InvalidArgument` for a type that this version does not know."""
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
        tier=message.tier or PRIMARY,
        shared=not message.host_only,
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
        part_digests=tuple(message.part_digests),
    )


def copy_request(message: checkpoints_pb2.ReportCopyRequest) -> CopyRequest:
    return CopyRequest(
        step=message.step,
        attempt=message.attempt,
        tier=message.tier,
        root=message.root,
        shared=not message.host_only,
        rank=None if message.sealed else message.rank,
        digest=message.digest,
        host=message.host,
        begun=message.begun,
    )


def damage_report(message: checkpoints_pb2.ReportDamageRequest) -> DamageReport:
    return DamageReport(
        step=message.step,
        attempt=message.attempt,
        host=message.host,
        reason=message.reason,
        tier=message.tier,
        sound=message.sound,
        generation=message.generation,
        object=message.object,
        unread=message.unread,
    )


def adopt_request(message: checkpoints_pb2.AdoptCheckpointRequest) -> AdoptRequest:
    return AdoptRequest(
        step=message.step,
        attempt=message.attempt,
        manifest_digest=message.manifest_digest,
        size_bytes=message.size_bytes,
        model_hash=message.model_hash,
    )


def maintenance_message(task: MaintenanceTask) -> checkpoints_pb2.MaintenanceTask:
    return checkpoints_pb2.MaintenanceTask(
        kind=TASKS[task.kind],
        step=task.step,
        generation=task.generation,
        attempt=task.attempt,
        tier=task.tier,
        path=task.path,
        manifest_digest=task.manifest_digest,
        object=task.object,
    )


def retention_author(message: retention_pb2.SetRetentionRequest) -> Author | None:
    """Return the rank that sends its own settings; None if another caller sets them."""
    return author(message.author) if message.HasField("author") else None


def if_revision(message: retention_pb2.SetRetentionRequest) -> int | None:
    return message.if_revision if message.HasField("if_revision") else None


def retention_record(message: retention_pb2.Retention) -> Retention:
    return Retention(
        keep=_keep(message.keep),
        tiers={tier: _keep(keep) for tier, keep in message.tiers.items()},
        who=message.who,
    )


def retention_message(record: Retention) -> retention_pb2.Retention:
    return retention_pb2.Retention(
        keep=keep_message(record.keep),
        tiers={tier: keep_message(keep) for tier, keep in record.tiers.items()},
        who=record.who,
    )


def _keep(message: retention_pb2.Keep) -> Keep:
    return Keep(
        latest=message.latest,
        every_steps=message.every_steps,
        best=message.best,
        metric=message.metric,
        highest=message.highest,
        age_ms=message.age_ms,
    )


def keep_message(keep: Keep) -> retention_pb2.Keep:
    return retention_pb2.Keep(
        latest=keep.latest,
        every_steps=keep.every_steps,
        best=keep.best,
        metric=keep.metric,
        highest=keep.highest,
        age_ms=keep.age_ms,
    )
