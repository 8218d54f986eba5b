"""The verdict on a recorded run: every checker over every history of its folder.

    verdict = judge(Path("runs/7"))
    print(verdict.summary())

It makes two streaming passes. The first reads etcd's own events, from which the checkers build their state. The
second reads all other records. Memory grows by a few dozen bytes an event, so an hour-long run fits;
`tests/unit/chaos/judgement/test_judge.py` measures it.

A verdict is *unknown* if the observer's record has a gap, ends early or is missing, or if a file is not a history. An
unknown verdict claims nothing, but still shows apparent violations. The report also names the rules that had nothing
to judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from strata_chaos.checkers import ALL, Checker
from strata_chaos.checkers.truth import Change, Clock, State, changes, listed
from strata_chaos.history import NOWHERE, History, HistoryError, Record, Where

OBSERVER: Final = "observer"
QUOTED_CHARS: Final = 1_000
"""Longest quote of a line as evidence: a value may have 64 KiB, and the place names the whole line."""


class Result(StrEnum):
    """The result of judging a run."""

    PASS = "pass"  # noqa: S105  # no password
    VIOLATION = "violation"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One violation: its checker and rule, a sentence, and the history lines that show it."""

    checker: str
    rule: str
    message: str
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.checker}/{self.rule}: {self.message}"]
        return "\n".join([*lines, *(f"    {line}" for line in self.evidence)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCoverage:
    """One rule: the property it requires, and how often it was judged and broken."""

    checker: str
    rule: str
    promise: str
    judged: int
    broken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict of `judge`, unknown after any uncertainty. `operations` counts ended operations by (op, outcome)."""

    result: Result
    violations: tuple[Violation, ...]
    uncertainties: tuple[str, ...]
    notes: tuple[str, ...]
    operations: dict[tuple[str, str], int]
    coverage: tuple[RuleCoverage, ...]
    lines: int
    events: int
    torn: tuple[str, ...]

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Rules that had nothing to judge."""
        return tuple(f"{each.checker}/{each.rule}" for each in self.coverage if not each.judged)

    def summary(self) -> str:
        """Return the verdict as text for a person."""
        judged = sum(each.judged for each in self.coverage)
        lines = [f"{self.result}: {self.lines} lines, {self.events} events of etcd, {judged} judgements"]
        lines += [f"unknown: {reason}" for reason in self.uncertainties]
        lines += [str(violation) for violation in self.violations]
        broken = [each for each in self.coverage if each.broken]
        lines += [f"{each.checker}/{each.rule}: broken {each.broken} times" for each in broken]
        by_op: dict[str, Counter[str]] = {}
        for (op, outcome), count in sorted(self.operations.items()):
            by_op.setdefault(op, Counter())[outcome] += count
        lines += [
            f"{op}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items()))
            for op, found in by_op.items()
        ]
        lines += list(self.notes)
        if self.unjudged:
            lines.append(f"judged nothing: {', '.join(self.unjudged)}")
        lines += [f"torn: {torn}" for torn in self.torn]
        return "\n".join(lines)


@dataclass(slots=True)
class _Trial:
    """The state of one call of `judge`."""

    history: History
    checkers: list[Checker]
    state: State = field(default_factory=State)
    clock: Clock = field(default_factory=Clock)
    uncertainties: list[str] = field(default_factory=list)
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    open: dict[str, str] = field(default_factory=dict)
    """Announced operations without an end so far: id -> op."""
    life: int = 0
    complete: bool = True
    """Whether each observer recorded that it had caught up at its end; a killed observer does not."""
    lines: int = 0
    events: int = 0
    at: Where = NOWHERE
    """The place of the line read last."""

    def counted(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            self.lines += 1
            self.at = record.where
            yield record

    def truth(self, files: list[Path]) -> None:
        """Judge etcd's changes in order, one life after the other."""
        for file in files:
            complete, self.complete = self.complete, False
            self.life += 1
            if self.life > 1:
                for checker in self.checkers:
                    checker.lost(self.state)
                self.state, self.clock.life = State(), self.life
            for item in changes(self.counted(self.history.of(file)), self.state, self.life):
                if isinstance(item, Change):
                    self.events += len(item.events)
                    for checker in self.checkers:
                        checker.change(item, self.state)
                    self.state.apply(item)
                else:
                    self._observed(item)
            self.complete = self.complete and complete

    def _observed(self, record: Record) -> None:
        if record.op == "observer.gap":
            self.uncertainties.append(
                f"etcd's events have a gap after revision {record.args['after']} ({record.where})"
            )
        elif record.op == "observer.ended":
            self.complete = record.args["complete"]
        elif record.op == "observer.listed":
            if record.args["why"] == "start" or (record.args["why"] == "snapshot" and self.life == 1):
                self.uncertainties.append("the observer started after the first write to etcd")
        elif record.op == "etcd.listed":
            key, held = listed(record)
            self.state.held[key] = held
        elif record.op == "observer.sample":
            self.clock.sample(record.result["revision"], record.t0)
        for checker in self.checkers:
            checker.record(record)

    def clients(self, files: list[Path]) -> None:
        """Judge all other records, file by file, and count the outcomes of operations."""
        for file in files:
            for record in self.counted(self.history.of(file)):
                if record.begun:
                    self.open[record.id] = record.op
                else:
                    self.open.pop(record.id, None)
                    self.operations[record.op, record.outcome.value] += 1
                for checker in self.checkers:
                    checker.record(record)
        for op in self.open.values():  # their processes died before the operations ended
            self.operations[op, "unknown"] += 1


def judge(folder: Path) -> Verdict:
    """Return the verdict on the run in `folder`, from all `*.jsonl` files below it."""
    history = History(folder)
    trial = _Trial(history, [make() for make in ALL])
    try:
        lives = {file: life for file in history.files if (life := _life_of(history, file))}
        observed = sorted(lives, key=lambda file: lives[file])
        if not observed:
            trial.uncertainties.append("no observer recorded etcd's changes")
        elif sorted(lives.values()) != list(range(1, len(lives) + 1)):
            trial.uncertainties.append(
                f"{len(observed)} observers recorded, of etcd's lives {sorted(lives.values())}; each life has one"
            )
        trial.truth(observed)
        trial.clients([file for file in history.files if file not in observed])
        for checker in trial.checkers:
            checker.finish(trial.clock, trial.state)
    except HistoryError as error:
        trial.uncertainties.append(str(error))
    except (KeyError, TypeError, AttributeError) as missing:
        trial.uncertainties.append(
            f"{trial.at}: a line lacks a field that its op must have, or the field has a wrong type: {missing!r}"
        )
    if trial.events and not trial.complete:
        trial.uncertainties.append("the observer did not catch up with etcd before it ended")
    if trial.events and not trial.operations:
        trial.uncertainties.append("no client recorded anything")
    return _verdict(trial)


def _life_of(history: History, file: Path) -> int:
    """Return the life of etcd that a file records; 0 if no observer wrote it."""
    first = next(iter(history.of(file)), None)
    if first is None or first.client != OBSERVER:
        return 0
    return int(first.args.get("life", 1)) if first.op == "observer.started" else 1


def _verdict(trial: _Trial) -> Verdict:
    found = [violation for checker in trial.checkers for violation in checker.findings.violations]
    places: set[Where] = {place for violation in found for place in violation.evidence}
    quoted = trial.history.quote(places) if places else {}
    violations = tuple(
        Violation(
            checker=each.checker,
            rule=each.rule,
            message=each.message,
            evidence=tuple(f"{place}: {_cut(quoted.get(place, ''))}" for place in each.evidence),
        )
        for each in found
    )
    uncertainties, result = (
        list(trial.uncertainties),
        Result.VIOLATION if violations else Result.PASS,
    )
    if uncertainties:  # an event missing from the record may cause an apparent violation
        result = Result.UNKNOWN
        uncertainties += [f"unproven: {violation}" for violation in violations]
        violations = ()
    return Verdict(
        result=result,
        violations=violations,
        uncertainties=tuple(uncertainties),
        notes=tuple(note for checker in trial.checkers for note in checker.findings.notes),
        operations=dict(trial.operations),
        coverage=tuple(
            RuleCoverage(
                checker=findings.checker,
                rule=rule,
                promise=promise,
                judged=findings.judged[rule],
                broken=findings.broken[rule],
            )
            for findings in (checker.findings for checker in trial.checkers)
            for rule, promise in findings.rules.items()
        ),
        lines=trial.lines,
        events=trial.events,
        torn=tuple(trial.history.torn.values()),
    )


def _cut(line: str) -> str:
    return line if len(line) <= QUOTED_CHARS else line[: QUOTED_CHARS - 1] + "…"
