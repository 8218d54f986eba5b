"""Authorisation of requests: the job and worker that a request names, checked against the table of rules."""

from __future__ import annotations

from typing import Any

from strata.core.access.authority import Identity, Role, refusal
from strata.errors import PermissionDenied, StrataError
from strata.v1.worlds_pb2 import ListJobsResponse


def check(refused: StrataError | None) -> None:
    """Raise the refusal, if there is one."""
    if refused is not None:
        raise refused


def check_call(identity: Identity | None, method: str, request: Any, cluster: str) -> None:
    """Return if `identity` may make this call of a method, such as "Worlds.GetJob"; else raise the refusal."""
    if identity is None:
        return
    fields = request.DESCRIPTOR.fields_by_name
    body = request.registration if "registration" in fields else request
    job: str | None
    if "arrival" in fields:
        job = request.arrival.job
    else:
        job = body.job if "job" in body.DESCRIPTOR.fields_by_name else None
    who = request.author if "author" in fields else body
    worker = who.worker_id if "worker_id" in who.DESCRIPTOR.fields_by_name else None
    check(refusal(identity, method, cluster=cluster, job=job, worker=worker))
    if "source_job" in fields:  # a second job, whose checkpoint the first job receives
        check(refusal(identity, method, cluster=cluster, job=request.source_job, worker=worker))


def hide_others(identity: Identity | None, response: Any) -> None:
    """Remove the jobs that `identity` may not read from a list of jobs; the list's page token stays valid."""
    if identity is None or not identity.jobs or identity.role is Role.COORDINATOR:
        return
    if isinstance(response, ListJobsResponse):
        seen = [job for job in response.jobs if job.name in identity.jobs]
        del response.jobs[:]
        response.jobs.extend(seen)


def check_session(identity: Identity | None, *, cluster: str, job: str, worker: str) -> None:
    """Return if `identity` may open a session for this worker of this job; else raise the refusal."""
    check(refusal(identity, "Sessions.Session", cluster=cluster, job=job, worker=worker))


def check_peer(identity: Identity | None, replica: str) -> None:
    """Return if `identity` may act for this replica: a coordinator acts under its own name only."""
    if identity is not None and identity.id != replica:
        raise PermissionDenied(
            f"{identity} is not replica {replica[:128]}",
            hint="give each coordinator a certificate (or token) whose id is its replica name",
        )
