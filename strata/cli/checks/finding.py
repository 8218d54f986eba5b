"""One thing that `strata doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at; `hint` says what to do about it, `commands` how, in this order."""

    level: Level
    what: str
    says: str
    hint: str = ""
    commands: tuple[str, ...] = ()


def ok(what: str, says: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(level="OK", what=what, says=says)


def warn(what: str, says: str, hint: str, *commands: str) -> Finding:
    """Return one that somebody should see to."""
    return Finding(level="WARN", what=what, says=says, hint=hint, commands=commands)


def fail(what: str, says: str, hint: str, *commands: str) -> Finding:
    """Return one with which something does not work; the command's exit status is 1."""
    return Finding(level="FAIL", what=what, says=says, hint=hint, commands=commands)
