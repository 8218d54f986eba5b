"""With which exit status `strata run` ends.

| the job is done                        | 0                                     |
| the job has failed                     | 78: whoever requeues it meets the same |
| this member was preempted              | 75: requeue it                        |
| a signal stopped this member           | 128 and its number, as a shell says   |

A job fails only for good: a limit of its spec was reached, which no new process changes. How its
ranks ended is in the log. What kept this member from being one has the status of its error.
"""

from __future__ import annotations

SIGNAL_BASE = 128
"""A shell says this and the signal's number of a process that a signal ended."""


def exit_status(code: int) -> int:
    """Return what a shell would: an exit code as it is, a signal as 128 and its number."""
    return SIGNAL_BASE - code if code < 0 else code


def of_signal(number: int) -> int:
    """Return the status of a run that a signal stopped."""
    return SIGNAL_BASE + number
