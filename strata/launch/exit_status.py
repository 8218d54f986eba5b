"""Exit status of `strata run`.

| the job is done                        | 0                                     |
| the job has failed                     | 78: a requeued run would fail again   |
| this member was preempted              | 75: requeue it                        |
| a signal stopped this member           | 128 and its number, as in a shell     |

A failed job stays failed: it reached a limit of its spec, and a new process does not change the limit. The log
says how its ranks ended. If an error kept this node from becoming a member, the status is the exit code of that
error.
"""

from __future__ import annotations

SIGNAL_BASE = 128
"""A shell reports this plus the signal's number for a process that a signal ended."""


def exit_status(code: int) -> int:
    """Return the status a shell would report: an exit code unchanged, a signal as 128 plus its number."""
    return SIGNAL_BASE - code if code < 0 else code


def of_signal(number: int) -> int:
    """Return the status of a run that a signal stopped."""
    return SIGNAL_BASE + number
