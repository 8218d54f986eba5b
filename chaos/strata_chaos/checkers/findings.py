"""What a checker says: which rules it judged how often, and which were broken, with the evidence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Protocol

from strata_chaos.checkers.truth import Change, Clock, State
from strata_chaos.history import Record, Where

MOST: Final = 20
"""Violations of one rule that are kept; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken promise, in a sentence, and the lines that show it."""

    checker: str
    rule: str
    message: str
    evidence: tuple[Where, ...]


@dataclass(slots=True)
class Findings:
    """Of one checker; `rules` has each rule's promise by its name."""

    checker: str
    rules: dict[str, str]
    judged: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, rule: str, holds: bool, message: str, *evidence: Where) -> bool:
        """Count that the rule was judged; unless it holds, keep the violation. Returns `holds`."""
        assert rule in self.rules, rule
        self.judged[rule] += 1
        if not holds:
            self.broken[rule] += 1
            if self.broken[rule] <= MOST:
                self.violations.append(
                    Violation(checker=self.checker, rule=rule, message=message, evidence=evidence)
                )
        return holds


class Checker(Protocol):
    """Judges one part of the protocols. Fed with all of etcd's changes first, then all else.

    It keeps no line: what it needs of one it keeps in a compact form, so that a long run fits.
    """

    findings: Findings

    def change(self, change: Change, before: State) -> None:
        """Judge one transaction of etcd; `before` is the state that it changed."""
        ...

    def lost(self, end: State) -> None:
        """Learn that etcd was lost when it held `end`: the changes that follow are of its next life."""
        ...

    def record(self, record: Record) -> None:
        """Judge one line of a client, a workload or the nemesis; in no order across files."""
        ...

    def finish(self, clock: Clock, end: State) -> None:
        """Judge what needs the whole; `end` is the last state."""
        ...
