"""The calls about retention: a job's policy, and the maintenance tasks (copies, removals) of its hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from strata.coordinator.calls.pages import fill
from strata.coordinator.calls.table import Row, change
from strata.coordinator.context import ReplicaContext, existing_job
from strata.core.access.authority import Identity
from strata.core.checkpoints import retention_plan
from strata.core.checkpoints.lifecycle import Author
from strata.core.checkpoints.maintenance import tasks
from strata.core.checkpoints.references import Retention
from strata.core.job import JobView
from strata.core.kv.records import CheckpointRecord
from strata.core.kv.txn import Decision
from strata.core.kv.view import Entry
from strata.v1 import checkpoints_pb2 as pb
from strata.v1 import retention_pb2 as retention_pb
from strata.wire import checkpoints as wire


def retention(context: ReplicaContext) -> Iterator[Row]:
    """Yield the rows that set and return a policy, and list maintenance tasks."""
    yield change(
        context,
        "Checkpoints.SetRetention",
        lambda r: (wire.retention_record(r.retention), wire.retention_author(r), wire.if_revision(r)),
        _decide_set_retention,
        _retention,
        exists=True,
    )
    yield Row(method="Checkpoints.GetRetention", answer=partial(_get_retention, context))
    yield Row(method="Checkpoints.ListMaintenance", answer=partial(_list_maintenance, context))


_Policy = tuple[Retention, Author | None, int | None]
"""The policy, its author, and the revision that the policy replaces."""


def _decide_set_retention(job: JobView, decoded: _Policy) -> Decision:
    policy, author, revision = decoded
    return retention_plan.decide_set_retention(job, policy, author=author, if_revision=revision)


def _retention(job: JobView, decoded: _Policy) -> Mapping[str, Any]:
    held = retention_plan.retention(job)
    return {"retention": wire.retention_message(held.record if held is not None else decoded[0])}


async def _get_retention(
    context: ReplicaContext,
    request: retention_pb.GetRetentionRequest,
    _identity: Identity | None,
) -> retention_pb.GetRetentionResponse:
    job = await existing_job(context, request.job)
    held, now_unix_ms = retention_plan.retention(job), int(context.unix_now() * 1000)
    answer = retention_pb.GetRetentionResponse()
    if not request.page_token:
        answer = retention_pb.GetRetentionResponse(
            retention=None if held is None else wire.retention_message(held.record),
            revision=0 if held is None else held.mod_revision,
        )
    going = {entry.key for entry, _tier in retention_plan.going(job, now_unix_ms=now_unix_ms)}
    kept: dict[str, list[str]] = {}
    for tier, stays in retention_plan.reasons(job, now_unix_ms=now_unix_ms).items():
        for key, why in stays.items():
            kept.setdefault(key, []).append(f"{tier}: {why}")

    def part(entry: Entry[CheckpointRecord]) -> retention_pb.GetRetentionResponse:
        name = _name(entry.record)
        return retention_pb.GetRetentionResponse(
            kept={name: "; ".join(kept[entry.key])} if entry.key in kept else {},
            going=[name] if entry.key in going else [],
        )

    fill(answer, job.checkpoints(), key=lambda entry: entry.key, part=part, request=request)
    return answer


async def _list_maintenance(
    context: ReplicaContext, request: pb.ListMaintenanceRequest, _identity: Identity | None
) -> pb.ListMaintenanceResponse:
    job = await existing_job(context, request.job)
    answer = pb.ListMaintenanceResponse(
        pending=retention_plan.pending(job, now_unix_ms=int(context.unix_now() * 1000))
    )
    fill(
        answer,
        tasks(job, request.host),
        key=lambda one: f"{one.step:020d}/{one.generation:020d}/{one.attempt}/{one.tier}/{one.kind.value}",
        part=lambda one: pb.ListMaintenanceResponse(tasks=[wire.maintenance_message(one)]),
        request=request,
    )
    return answer


def _name(record: CheckpointRecord) -> str:
    return f"{record.step}/{record.attempt}"
