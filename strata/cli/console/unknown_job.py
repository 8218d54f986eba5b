"""Hint in an error about an unknown job: the names of existing jobs."""

from __future__ import annotations

from typing import Final

from strata.config import ClientConfig
from strata.errors import NotFound, StrataError

NAMED: Final = 5
_LIMIT_S: Final = 2.0


def naming_jobs(error: NotFound, found: ClientConfig) -> NotFound:
    """If the error reports that the command's job does not exist, return the error with existing jobs' names in
    the hint.

    Return any other error unchanged, and also if no coordinator lists a job for this caller.
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    if error.message != f"no job {found.job} exists":
        return error
    try:
        with CoordinatorClient.connect(
            found.endpoints, timeout_s=_LIMIT_S, credentials=found.credentials
        ) as client:
            names = [job.name for job in client.jobs()]
    except StrataError:
        return error
    if not names:
        return error
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return NotFound(
        error.message, hint=f"{error.hint}; --job takes one of these: {', '.join(names[:NAMED])}{more}"
    )
