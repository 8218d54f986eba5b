"""Many runs of one scenario under different seeds: their common verdict and summary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from strata_chaos.exits import Exit
from strata_chaos.judgement.report import Result, columns, fault_table, operation_table, rows
from strata_chaos.run.folder import SCHEMA


def worst(results: Sequence[Result]) -> Exit:
    """Return the worst verdict of all runs. A violation outweighs everything else."""
    found = {result.exit for result in results}
    for verdict in (Exit.VIOLATION, Exit.INFRASTRUCTURE, Exit.UNKNOWN):
        if verdict in found:
            return verdict
    return Exit.PASS


def text(results: Sequence[Result]) -> str:
    """Return the summary for people."""
    injuries = [injury for result in results for injury in result.injuries]
    verdicts = Counter(result.exit.name for result in results)
    minutes = sum(result.duration_s for result in results) / 60
    injected, effective = sum(i.injected for i in injuries), sum(i.effective for i in injuries)
    lines = [
        ", ".join(f"{count} {name}" for name, count in sorted(verdicts.items())),
        f"{len(results)} runs, {minutes:.0f} minutes, {injected} faults injected, {effective} effective",
        "",
        *fault_table(injuries),
        "",
        *operation_table(_operations(results)),
        "",
        *columns(
            [
                ("seed", "backend", "effective", "findings", "verdict"),
                *(
                    (
                        str(result.seed),
                        result.backend,
                        str(sum(i.effective for i in result.injuries)),
                        str(len(result.findings)),
                        result.exit.name,
                    )
                    for result in results
                ),
            ]
        ),
    ]
    for result in results:
        for finding in result.findings:
            lines += ["", f"seed {result.seed}: VIOLATION ({finding.checker}): {finding.message}"]
            lines += [f"    folder {result.folder}"]
        if result.broken:
            lines += ["", f"seed {result.seed}: the run failed: {result.broken}"]
    return "\n".join(lines) + "\n"


def body(results: Sequence[Result]) -> dict[str, Any]:
    """Return the summary for programs."""
    injuries = [injury for result in results for injury in result.injuries]
    verdict = worst(results)
    return {
        "schema": SCHEMA,
        "verdict": verdict.name.lower(),
        "exit_code": int(verdict),
        "runs": [
            {
                "scenario": result.scenario,
                "seed": result.seed,
                "backend": result.backend,
                "verdict": result.exit.name.lower(),
                "effective": sum(i.effective for i in result.injuries),
                "findings": [finding.as_json() for finding in result.findings],
                "folder": str(result.folder),
            }
            for result in results
        ],
        "injected": sum(i.injected for i in injuries),
        "effective": sum(i.effective for i in injuries),
        "faults": [row.as_json() for row in rows(injuries)],
        "operations": _operations(results),
    }


def _operations(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for op, counts in result.operations.items():
            total[op].update(counts)
    return {op: dict(counts) for op, counts in total.items()}
