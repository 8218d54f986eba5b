"""The result of one check of `strata doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. `hint` is the remedy in words; `commands` carry it out, in this order."""

    level: Level
    what: str
    says: str
    hint: str = ""
    commands: tuple[str, ...] = ()


def ok(what: str, says: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(level="OK", what=what, says=says)


def warn(what: str, says: str, hint: str, *commands: str) -> Finding:
    """Return a finding that an operator should remedy."""
    return Finding(level="WARN", what=what, says=says, hint=hint, commands=commands)


def fail(what: str, says: str, hint: str, *commands: str) -> Finding:
    """Return a finding of something that does not work; the command's exit status is then 1."""
    return Finding(level="FAIL", what=what, says=says, hint=hint, commands=commands)
