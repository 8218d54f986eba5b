"""Exit codes of a run and of a check."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The verdict, as an exit code."""

    PASS = 0
    VIOLATION = 1
    """A property that must hold was violated."""
    UNKNOWN = 2
    """No violation was found, but the run proves too little: a fault had no effect, or the run was cut short."""
    INFRASTRUCTURE = 3
    """The run itself failed; it proves nothing about Strata."""
