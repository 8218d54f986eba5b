"""Finding what a request names.

What is absent is looked for once more, in a fresh view: that there is no such thing is a refusal,
and a refusal is a decision (PROTOCOLS 2.2).
"""

from __future__ import annotations

from strata.coordinator.context import ReplicaContext
from strata.core.job import JobView
from strata.errors import NotFound


def job_view(context: ReplicaContext, name: str) -> JobView:
    """Return a job as the view shows it, whether it exists or not."""
    return context.job(name)


async def existing_job(context: ReplicaContext, name: str) -> JobView:
    """Return a job that exists; `NotFound` when there is none of that name."""
    job = context.job(name)
    if not job.exists:
        await context.mirror.fresh()
    if not job.exists:
        raise NotFound(f"no job {name} exists", hint="a job begins with its first member")
    return job
