"""The plan of a restore of the control plane, as text and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from strata.cli.console.output import print_table, printable
from strata.core.kv.records import Latest
from strata.core.restore.control_plane import RestoredJob

_SHOWN = 8
"""How many steps a line lists."""


def print_plan(jobs: Sequence[RestoredJob], skipped: Iterable[str], *, empty: str) -> None:
    """Print one row for each job, and below it a line for each change and warning."""
    rows = [
        (
            job.name,
            f"{job.generation_before or '-'} to {job.generation or '-'}",
            f"{_step(job.latest_before)} to {_step(job.latest)}",
            len(job.changes.adopted),
            len(job.changes.aborted),
            len(job.changes.lost) + len(job.changes.corrupt),
        )
        for job in jobs
    ]
    columns = ("JOB", "GENERATION", "LATEST", "ADOPTED", "GIVEN UP", "LOST")
    print_table("jobs, before and after", columns, rows, empty=empty)
    for line in (*(line for job in jobs for line in lines(job)), *skipped):
        sys.stdout.write(f"{printable(line)}\n")


def lines(job: RestoredJob) -> list[str]:
    """Return sentences on the checkpoints that a job's restore adopts, gives up or cannot restore."""
    changes, found = job.changes, []
    for slots, what in (
        (changes.adopted, "committed in storage, and adopted"),
        (changes.aborted, "not ended, and given up"),
        (changes.lost, "lost: its bytes are not in storage"),
        (changes.corrupt, "kept as CORRUPT: nothing of it can be read"),
        (changes.fewer_copies, "present, with fewer copies than before"),
    ):
        if slots:
            found.append(f"job {job.name}: {_steps(slots)}: {what}")
    found += [f"job {job.name}: {warning}" for warning in changes.warnings]
    if changes.not_searched:
        roots = ", ".join(sorted(changes.not_searched))
        found.append(f"job {job.name}: not searched, so taken as it was: {roots} (--storage)")
    if not job.in_base:
        found.append(
            f"job {job.name}: storage knows no limits, phase, pins, tags, retention and history of it;"
            " its next run brings its limits"
        )
    return found


def as_values(job: RestoredJob) -> dict[str, Any]:
    """Return one job's changes for `--json`."""
    changes = job.changes
    return {
        "name": job.name,
        "generation_before": job.generation_before,
        "generation": job.generation,
        "latest_before": job.latest_before.step if job.latest_before is not None else None,
        "latest": job.latest.step if job.latest is not None else None,
        "in_base": job.in_base,
        **{
            name: [{"step": step, "generation": generation} for step, generation in getattr(changes, name)]
            for name in ("adopted", "aborted", "lost", "corrupt", "fewer_copies")
        },
        "warnings": changes.warnings,
        "not_searched": sorted(changes.not_searched),
    }


def _step(latest: Latest | None) -> str:
    return f"{latest.step}" if latest is not None else "-"


def _steps(slots: Sequence[tuple[int, int]]) -> str:
    steps = [str(step) for step, _generation in slots]
    shown = ", ".join(steps[:_SHOWN])
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return f"step{'s' if len(steps) > 1 else ''} {shown}{more}"
