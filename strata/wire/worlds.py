"""Worlds and jobs."""

from __future__ import annotations

from strata.core.checkpoints import find
from strata.core.job import JobView
from strata.core.records import JobPhase, JobSpec, Member, Phase, RestorePoint, Standbys, WorldHead
from strata.v1 import worlds_pb2
from strata.wire.enums import PHASES


def world_message(job: JobView, head: WorldHead) -> worlds_pb2.World:
    """Return the head of a world, with where its restore point lies."""
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
    """Return what one revision says of a job as a whole."""
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
    )


def phase_of(job: JobView) -> tuple[Phase, str]:
    """Return where the job stands and why; RUNNING until somebody wrote otherwise."""
    record = job.view.record(job.keys.phase, JobPhase)
    return (record.phase, record.reason) if record is not None else (Phase.RUNNING, "")


def spec_message(spec: JobSpec) -> worlds_pb2.JobSpec:
    return worlds_pb2.JobSpec(
        min_workers=spec.min_workers,
        max_workers=spec.max_workers,
        settle_s=spec.settle_s,
        max_fruitless_generations=spec.max_fruitless_generations,
    )


def spec_record(message: worlds_pb2.JobSpec) -> JobSpec:
    """Return the limits that a message asks for; zero means the default."""
    default = JobSpec()
    least = message.min_workers or default.min_workers
    return JobSpec(
        min_workers=least,
        max_workers=message.max_workers or max(least, default.max_workers),
        settle_s=message.settle_s or default.settle_s,
        max_fruitless_generations=message.max_fruitless_generations or default.max_fruitless_generations,
    )


def _restore(job: JobView, point: RestorePoint) -> worlds_pb2.RestorePoint:
    """The record may have gone since: the point then still names the attempt."""
    entry = find(job, point.step, point.attempt)
    return worlds_pb2.RestorePoint(
        step=point.step,
        attempt=point.attempt,
        record_generation=point.record_generation,
        path="" if entry is None else entry.record.path,
        manifest_digest="" if entry is None else entry.record.manifest_digest,
    )
