"""The interface of checkers, and their findings: how often each rule was judged and broken, with the evidence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Protocol

from strata_chaos.checkers.truth import Change, Clock, State
from strata_chaos.history import Record, Where

MOST: Final = 20
"""How many violations of one rule are kept; further violations are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One violation of a rule: a sentence, and the history lines that show it."""

    checker: str
    rule: str
    message: str
    evidence: tuple[Where, ...]


@dataclass(slots=True)
class Findings:
    """Findings of one checker. `rules` maps a rule's name to the property that it requires."""

    checker: str
    rules: dict[str, str]
    judged: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, rule: str, holds: bool, message: str, *evidence: Where) -> bool:
        """Count one judgement of the rule, keep a violation if `holds` is false, and return `holds`."""
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
    """Judges one part of the protocols. It gets all changes of etcd first, then all other records.

    It keeps no records, only compact facts from the records, so that a long run fits into memory.
    """

    findings: Findings

    def change(self, change: Change, before: State) -> None:
        """Judge one transaction of etcd; `before` is the state before it."""
        ...

    def lost(self, end: State) -> None:
        """Note that etcd was lost; its last state was `end`. All later changes are of the next life."""
        ...

    def record(self, record: Record) -> None:
        """Judge one record of a client, a workload or the nemesis. Records of different files come in any order."""
        ...

    def finish(self, clock: Clock, end: State) -> None:
        """Judge the rules that need the whole run; `end` is the last state."""
        ...
