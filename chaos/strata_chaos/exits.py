"""What a run or a check ends with."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The verdict, as an exit code."""

    PASS = 0
    VIOLATION = 1
    """Something that must hold did not."""
    UNKNOWN = 2
    """Nothing is known to be wrong, and not enough is known to be right: a fault of the script had
    no effect, or the run was cut short."""
    INFRASTRUCTURE = 3
    """The run itself broke down: nothing is said about Strata."""
