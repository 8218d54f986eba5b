"""Worlds, jobs, stop notices and generations, as messages and records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from strata.core.checkpoints.lifecycle import find
from strata.core.ids import WorkerId
from strata.core.job import JobView
from strata.core.kv.records import (
    GenerationRecord,
    JobPhase,
    JobSpec,
    LeaveRequest,
    Member,
    Phase,
    RestorePoint,
    Standbys,
    StopAction,
    StopNotice,
    WorldHead,
)
from strata.core.kv.view import Entry
from strata.core.stop.requests import StopRequest, active_world, leave_notice
from strata.v1 import worlds_pb2
from strata.wire.checkpoints import tier_messages
from strata.wire.datasets import cursor_messages
from strata.wire.enums import PHASES, STOP_ACTIONS, from_wire


def world_message(job: JobView, head: WorldHead) -> worlds_pb2.World:
    """Return the head of a world, with the path of its restore point."""
    return worlds_pb2.World(
        generation=head.generation,
        size=head.size,
        members=head.members,
        forming=head.forming,
        reason=head.reason,
        restore=None if head.restore is None else _restore(job, head.restore),
    )


def place_message(member: Member) -> worlds_pb2.WorldMember:
    """Return a member's place in its world."""
    return worlds_pb2.WorldMember(
        worker_id=member.worker,
        incarnation=member.incarnation,
        group_rank=member.group_rank,
        slots=member.slots,
        first_rank=member.first_rank,
    )


def job_message(job: JobView) -> worlds_pb2.Job:
    """Return a summary of a job, as of one revision."""
    phase, reason = phase_of(job)
    spec, head, latest = job.spec(), job.head(), job.latest()
    standbys = job.view.record(job.keys.standbys, Standbys)
    return worlds_pb2.Job(
        name=job.keys.name,
        phase=PHASES[phase],
        phase_reason=reason,
        spec=None if spec is None else spec_message(spec.record),
        world=None if head is None else world_message(job, head.record),
        workers=len(job.view.names(job.keys.workers)),
        standbys=() if standbys is None else standbys.workers,
        latest_step=0 if latest is None else latest.record.step,
        has_latest=latest is not None,
        notice=notice_of(job),
        cursors=cursor_messages(job),
    )


def phase_of(job: JobView) -> tuple[Phase, str]:
    """Return the job's phase and its reason; RUNNING until another phase is written."""
    record = job.view.record(job.keys.phase, JobPhase)
    return (record.phase, record.reason) if record is not None else (Phase.RUNNING, "")


def notice_message(generation: int, notice: StopNotice) -> worlds_pb2.StopNotice:
    """Return the stop notice of `generation` as a message. A notice that only pauses has the action PAUSE."""
    alone = notice.pause and notice.action is StopAction.SCALE
    return worlds_pb2.StopNotice(
        generation=generation,
        action=STOP_ACTIONS[StopAction.PAUSE if alone else notice.action],
        reason=notice.reason,
        worker_ids=notice.workers,
        grace_ms=notice.grace_ms,
        pause=notice.pause and not alone,
    )


def notice_record(message: worlds_pb2.StopNotice) -> StopNotice:
    """Return the stop notice in a message."""
    action = from_wire(STOP_ACTIONS, message.action)
    pauses = action is StopAction.PAUSE
    return StopNotice(
        action=StopAction.SCALE if pauses else action,
        reason=message.reason,
        workers=tuple(map(WorkerId, message.worker_ids)),
        grace_ms=message.grace_ms,
        pause=message.pause or pauses,
    )


def notice_of(job: JobView) -> worlds_pb2.StopNotice | None:
    """Return the stop notice for the ranks that run now, or None."""
    world = active_world(job) if job.phase() is Phase.RUNNING else None
    entry = None if world is None else job.notice(world.head.generation)
    return None if world is None or entry is None else notice_message(world.head.generation, entry.record)


def stop_message(
    job: str, reason: str, *, grace_s: float, generation: int = 0, leaving: Sequence[str] = ()
) -> worlds_pb2.StopJobRequest:
    """Return the request to stop the ranks of a generation. Then the members in `leaving` leave; all members if
    it is empty.

    The coordinators merge the request with an earlier notice. `grace_s` 0 means that the ranks stop immediately,
    without a save. `generation` 0 means the current generation.
    """
    return worlds_pb2.StopJobRequest(
        job=job,
        action=worlds_pb2.STOP_ACTION_DRAIN if leaving else worlds_pb2.STOP_ACTION_PREEMPT,
        worker_ids=leaving,
        reason=reason,
        generation=generation,
        grace_ms=round(1000 * grace_s),
        now=not grace_s,
    )


def notice_for_member(
    job: JobView, leave_requests: Iterable[LeaveRequest], worker: str, incarnation: int
) -> worlds_pb2.StopNotice | None:
    """Return the newest notice in `leave_requests` (`core.stop.requests.leave_requests`) that requests this incarnation
    to leave, or None.
    """
    head, notice = job.head(), leave_notice(leave_requests, worker, incarnation)
    return None if head is None or notice is None else notice_message(head.record.generation, notice)


def stop_request(message: worlds_pb2.StopJobRequest) -> StopRequest:
    """Return the stop request in a message; the message also names the job, which is not part of the result."""
    return StopRequest(
        action=from_wire(STOP_ACTIONS, message.action),
        reason=message.reason,
        workers=tuple(map(WorkerId, message.worker_ids)),
        grace_ms=message.grace_ms,
        generation=message.generation,
        now=message.now,
    )


def generation_message(job: JobView, entry: Entry[GenerationRecord]) -> worlds_pb2.Generation:
    """Return one entry of the job's history; the entry of the current generation has its newest committed step."""
    record, generation = entry.record, int(entry.name)
    step, latest = record.committed_step, job.latest()
    if step is None and latest is not None:
        own = latest.record.generation == latest.record.record_generation == generation
        step = latest.record.step if own else None
    return worlds_pb2.Generation(
        world=worlds_pb2.World(
            generation=generation,
            size=record.size,
            members=record.members,
            forming=record.members == 0,
            reason=record.reason,
            restore=None if record.restore is None else _restore(job, record.restore),
        ),
        began_unix_ms=record.began_unix_ms,
        committed_step=step or 0,
        has_committed=step is not None,
        failure=record.failure,
    )


def spec_message(spec: JobSpec) -> worlds_pb2.JobSpec:
    return worlds_pb2.JobSpec(
        min_workers=spec.min_workers,
        max_workers=spec.max_workers,
        settle_s=spec.settle_s,
        max_no_progress_generations=spec.max_no_progress_generations,
        max_generations=spec.max_generations,
    )


def spec_record(message: worlds_pb2.JobSpec) -> JobSpec:
    """Return the job limits in a message; zero means the default."""
    default = JobSpec()
    least = message.min_workers or default.min_workers
    return JobSpec(
        min_workers=least,
        max_workers=message.max_workers or max(least, default.max_workers),
        settle_s=message.settle_s or default.settle_s,
        max_no_progress_generations=message.max_no_progress_generations
        or default.max_no_progress_generations,
        max_generations=message.max_generations,
    )


def _restore(job: JobView, point: RestorePoint) -> worlds_pb2.RestorePoint:
    """Return the restore point, without a path if the checkpoint's record was deleted since."""
    entry = find(job, point.step, point.attempt)
    return worlds_pb2.RestorePoint(
        step=point.step,
        attempt=point.attempt,
        record_generation=point.record_generation,
        path="" if entry is None else entry.record.path,
        manifest_digest="" if entry is None else entry.record.manifest_digest,
        tiers=() if entry is None else tier_messages(entry.record),
    )
