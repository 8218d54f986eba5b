"""Lookup of the job that a request names.

A missing job is looked up again in a fresh view: "there is no such job" is a refusal, and a refusal is a decision
(PROTOCOLS 2.2).
"""

from __future__ import annotations

from strata.coordinator.context import ReplicaContext
from strata.core.job import JobView
from strata.errors import NotFound


async def existing_job(context: ReplicaContext, name: str) -> JobView:
    """Return an existing job; `NotFound` if no job has that name."""
    job = context.job(name)
    if not job.exists:
        await context.mirror.fresh()
    if not job.exists:
        raise NotFound(f"no job {name} exists", hint="a job begins with its first member")
    return job
