"""Exit codes of the commands, and the code for each error.

Every command exits with one of these codes, so that a scheduler or a script can decide what to do next.
"""

from __future__ import annotations

from enum import IntEnum

from strata.core import exit_codes
from strata.errors import (
    CheckpointNotFound,
    ConfigError,
    InvalidArgument,
    JobFailed,
    NotFound,
    OutcomeUnknown,
    Refused,
    StrataError,
    Unavailable,
)


class Exit(IntEnum):
    """The meaning of a command's exit status."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    UNAVAILABLE = 3
    REFUSED = exit_codes.REFUSED
    PREEMPTED = exit_codes.PREEMPTED
    """The job was preempted: requeue it."""
    DO_NOT_REQUEUE = exit_codes.DO_NOT_REQUEUE
    """The job failed for a reason that would make a retry fail too."""


_BY_CLASS: tuple[tuple[type[StrataError], Exit], ...] = (
    (ConfigError, Exit.USAGE),
    (InvalidArgument, Exit.USAGE),
    (Unavailable, Exit.UNAVAILABLE),
    (OutcomeUnknown, Exit.UNAVAILABLE),
    (JobFailed, Exit.DO_NOT_REQUEUE),
    (Refused, Exit.REFUSED),
    (NotFound, Exit.REFUSED),
    (CheckpointNotFound, Exit.REFUSED),
)


def exit_code(error: StrataError) -> Exit:
    """Return the exit status for an error that ends a command."""
    for cls, code in _BY_CLASS:
        if isinstance(error, cls):
            return code
    return Exit.FAILURE
