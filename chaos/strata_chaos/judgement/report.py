"""The report of one run or of many, as text for people and as JSON for programs; both have the same contents."""

from __future__ import annotations

import shlex
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata_chaos.exits import Exit
from strata_chaos.faults.record import Injury
from strata_chaos.judgement.judge import RuleCoverage
from strata_chaos.judgement.verdict import Finding
from strata_chaos.run.folder import SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run. `broken`, `cut_short` and `uncertainties` limit what it proves; `exit` ranks them."""

    scenario: str
    seed: int
    duration_s: float
    backend: str
    folder: Path
    scenario_argument: str = ""
    """The value of `--scenario` that selects the scenario; empty if it is the scenario's name."""
    injuries: Sequence[Injury] = ()
    findings: Sequence[Finding] = ()
    operations: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Operation of a client -> outcome -> count."""
    rules: Sequence[RuleCoverage] = ()
    """How often each rule of the checkers was judged and broken."""
    uncertainties: Sequence[str] = ()
    """Why the verdict is unknown."""
    restarts: int = 0
    broken: str = ""
    """Why the run itself failed."""
    cut_short: bool = False

    @property
    def idle(self) -> list[Injury]:
        """Scripted faults that had no effect."""
        return [injury for injury in self.injuries if injury.planned.required and not injury.effective]

    @property
    def exit(self) -> Exit:
        """The exit code of the worst result: a violation, then a failed run, then an unknown verdict, then success."""
        if self.findings:
            return Exit.VIOLATION
        if self.broken:
            return Exit.INFRASTRUCTURE
        return Exit.UNKNOWN if self.cut_short or self.idle or self.uncertainties else Exit.PASS

    @property
    def verdict(self) -> str:
        """The verdict as a sentence."""
        match self.exit:
            case Exit.VIOLATION:
                return f"VIOLATION: {len(self.findings)} found"
            case Exit.INFRASTRUCTURE:
                return f"INFRASTRUCTURE: {self.broken.splitlines()[0]}"
            case Exit.UNKNOWN if self.cut_short:
                return "UNKNOWN: the run was cut short"
            case Exit.UNKNOWN if self.uncertainties:
                return f"UNKNOWN: {self.uncertainties[0]}"
            case Exit.UNKNOWN:
                names = ", ".join(f"{i.planned.fault} ({i.planned.number})" for i in self.idle)
                return f"UNKNOWN: without effect: {names}"
            case Exit.PASS:
                return "PASS: no violation"

    @property
    def replay(self) -> str:
        """The command that repeats the run."""
        options = f"--seed {self.seed} --duration {self.duration_s:g} --backend {self.backend}"
        return f"strata-chaos run --scenario {shlex.quote(self.scenario_argument or self.scenario)} {options}"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, maximum and number of several durations."""

    p50_s: float
    max_s: float
    count: int

    @classmethod
    def of(cls, times: Iterable[float | None]) -> Spread | None:
        """Return the spread of the durations that are not None; None if all are None."""
        known = [value for value in times if value is not None]
        return cls(statistics.median(known), max(known), len(known)) if known else None

    def __str__(self) -> str:
        return f"{_time(self.p50_s)} / {_time(self.max_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """All injections of one fault."""

    fault: str
    injected: int
    effective: int
    leader: Spread | None
    barrier: Spread | None
    barrier_healed: Spread | None
    whole: Spread | None

    def as_json(self) -> dict[str, Any]:
        """Return the entry of report.json."""
        spreads = {
            name: None
            if spread is None
            else {"p50_s": round(spread.p50_s, 3), "max_s": round(spread.max_s, 3), "count": spread.count}
            for name, spread in (
                ("leader", self.leader),
                ("barrier", self.barrier),
                ("barrier_after_healing", self.barrier_healed),
                ("whole", self.whole),
            )
        }
        return {"fault": self.fault, "injected": self.injected, "effective": self.effective, **spreads}


def rows(injuries: Iterable[Injury]) -> list[FaultRow]:
    """Return one row for each fault, sorted by name."""
    by_fault: dict[str, list[Injury]] = defaultdict(list)
    for injury in injuries:
        by_fault[injury.planned.fault].append(injury)
    return [
        FaultRow(
            fault=fault,
            injected=sum(i.injected for i in those),
            effective=sum(i.effective for i in those),
            leader=Spread.of(i.leader_s for i in those),
            barrier=Spread.of(i.barrier_s for i in those if not i.barrier_needed_healing),
            barrier_healed=Spread.of(i.barrier_s for i in those if i.barrier_needed_healing),
            whole=Spread.of(i.whole_s for i in those),
        )
        for fault, those in sorted(by_fault.items())
    ]


def text(result: Result) -> str:
    """Return the report for people."""
    effective = sum(injury.effective for injury in result.injuries)
    lines = [
        result.verdict,
        "",
        f"scenario {result.scenario}, seed {result.seed}, {result.duration_s:g} s, backend {result.backend}",
        f"{sum(i.injected for i in result.injuries)} faults injected, {effective} effective",
        "",
        *fault_table(result.injuries),
    ]
    if result.restarts:
        lines += ["", f"processes that ended by themselves and were started again: {result.restarts}"]
    if result.operations:
        lines += ["", *operation_table(result.operations)]
    if result.rules:
        lines += ["", *rule_table(result.rules)]
    if skipped := [injury for injury in result.injuries if not injury.effective]:
        lines += ["", "without effect"]
        lines += [f"  {i.planned.number} {i.planned.fault}: {i.evidence}" for i in skipped]
    for finding in result.findings:
        lines += ["", f"VIOLATION ({finding.checker}): {finding.message}"]
        lines += [f"    {line}" for part in finding.evidence for line in part.splitlines()]
    lines += [line for reason in result.uncertainties for line in ("", f"unknown: {reason}")]
    if result.broken:
        lines += ["", f"the run failed: {result.broken}"]
    lines += ["", f"folder  {result.folder}", f"again   {result.replay}"]
    lines += [f"judge   strata-chaos check {result.folder}"]
    return "\n".join(lines) + "\n"


def body(result: Result) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "schema": SCHEMA,
        "verdict": result.exit.name.lower(),
        "exit_code": int(result.exit),
        "sentence": result.verdict,
        "scenario": result.scenario,
        "seed": result.seed,
        "duration_s": result.duration_s,
        "backend": result.backend,
        "folder": str(result.folder),
        "faults": [row.as_json() for row in rows(result.injuries)],
        "injuries": [injury.as_json() for injury in result.injuries],
        "operations": {op: dict(counts) for op, counts in result.operations.items()},
        "rules": [
            {
                "checker": r.checker,
                "rule": r.rule,
                "promise": r.promise,
                "judged": r.judged,
                "broken": r.broken,
            }
            for r in result.rules
        ],
        "uncertainties": list(result.uncertainties),
        "restarts": result.restarts,
        "findings": [finding.as_json() for finding in result.findings],
        "broken": result.broken,
        "cut_short": result.cut_short,
        "replay": result.replay,
    }


def fault_table(injuries: Iterable[Injury]) -> list[str]:
    """Return the lines of the fault table, with recovery times as median / maximum."""
    cells: list[tuple[str, ...]] = [
        ("fault", "injected", "effective", "new leader", "next barrier", "after healing", "all well")
    ]
    for row in rows(injuries):
        spreads = (row.leader, row.barrier, row.barrier_healed, row.whole)
        shown = ("-" if spread is None else str(spread) for spread in spreads)
        cells.append((row.fault, str(row.injected), str(row.effective), *shown))
    if len(cells) == 1:
        return ["no fault was planned"]
    return [
        *columns(cells),
        "",
        "times are p50 / max in seconds: new leader and next barrier from the injection; next barrier",
        "after healing, if it had to wait for that; all well from healing, if no other fault began.",
    ]


def operation_table(operations: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the lines of the table of clients' operations."""
    cells: list[tuple[str, ...]] = [("operation", "ok", "fail", "unknown")]
    for op, counts in sorted(operations.items()):
        cells.append((op, *(str(counts.get(outcome, 0)) for outcome in ("ok", "fail", "unknown"))))
    return columns(cells)


def rule_table(rules: Iterable[RuleCoverage]) -> list[str]:
    """Return a table of the rules with their counts of judgements and violations, and a list of those never judged."""
    cells: list[tuple[str, ...]] = [("rule", "judged", "broken")]
    cells += [(f"{r.checker}/{r.rule}", str(r.judged), str(r.broken)) for r in rules if r.judged]
    idle = [f"{r.checker}/{r.rule}" for r in rules if not r.judged]
    return [
        *columns(cells),
        *textwrap.wrap(f"nothing to judge for: {', '.join(idle)}", 100, break_on_hyphens=False),
    ]


def columns(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned cells, the first column to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"
