"""With which exit status `strata run` ends."""

from __future__ import annotations

SIGNAL_BASE = 128
"""A shell says this and the signal's number of a process that a signal ended."""


def exit_status(code: int) -> int:
    """Return what a shell would: an exit code as it is, a signal as 128 and its number."""
    return SIGNAL_BASE - code if code < 0 else code


def of_signal(number: int) -> int:
    """Return the status of a run that a signal stopped."""
    return SIGNAL_BASE + number


def of_failed_job(rank_code: int) -> int:
    """Return the status of a run whose job failed; `rank_code`: of the rank that failed first here, or 0."""
    return exit_status(rank_code) or 1
