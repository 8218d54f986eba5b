"""One run from start to report, and the judgement of a saved run. Begin here to read this package."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from strata.errors import ConfigError, StrataError
from strata.observe import configure
from strata_chaos import backends, faults
from strata_chaos.faults.schedule import PlannedFault, plan
from strata_chaos.judgement import expectations, report
from strata_chaos.judgement.judge import judge
from strata_chaos.judgement.log_errors import CHECKER as COMPLAINTS
from strata_chaos.judgement.log_errors import SUSPENDED, errors_in_logs
from strata_chaos.judgement.report import Result
from strata_chaos.judgement.verdict import Finding
from strata_chaos.run.folder import RunFolder
from strata_chaos.run.programs import members_of
from strata_chaos.run.session import Session
from strata_chaos.scenario import Scenario

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The parameters of one run."""

    scenario: Scenario
    seed: int
    duration_s: float
    backend: str

    def plan(self) -> tuple[PlannedFault, ...]:
        """Return the faults that follow from scenario, seed, duration and backend.

        Raises `ConfigError` if the scenario does not run on that backend, or no fault fits into the duration.
        """
        if self.backend not in self.scenario.backends:
            raise ConfigError(
                f"scenario {self.scenario.name} does not run on the backend {self.backend}",
                hint=f"use --backend {self.scenario.backends[0]}",
            )
        if unknown := [name for name in self.scenario.fault_names if name not in faults.ALL]:
            raise ConfigError(
                f"scenario {self.scenario.name}: there is no fault {unknown[0]!r}",
                hint="`strata-chaos list` shows them",
            )
        return plan(
            self.scenario,
            rng=random.Random(self.seed),
            duration_s=self.duration_s,
            usable=faults.usable(self.backend),
        )


def run(run_spec: RunSpec, folder: RunFolder, *, started: str, say: Say, keep: bool) -> Result:
    """Run as `run_spec` specifies, judge the run and write the report into the folder; return the result.

    If the system does not start, that is a result too. Raise `ConfigError` only if the run can never start.
    """
    planned = run_spec.plan()
    backend = backends.ALL[run_spec.backend]
    if why_not := backend.available():
        raise ConfigError(f"the backend {run_spec.backend} is not available: {why_not}")
    folder.write_run(
        run_spec.scenario,
        planned,
        seed=run_spec.seed,
        duration_s=run_spec.duration_s,
        backend=run_spec.backend,
        started=started,
    )
    result = Result(
        scenario=run_spec.scenario.name,
        scenario_argument=run_spec.scenario.scenario_argument,
        seed=run_spec.seed,
        duration_s=run_spec.duration_s,
        backend=run_spec.backend,
        folder=folder.path,
    )
    try:
        workers = max(1, len(run_spec.scenario.workloads))
        members = members_of(run_spec.scenario)
        topology = run_spec.scenario.topology
        with (
            _logs_to(folder.path / "logs" / "strata-chaos.log"),
            backend.running(topology, folder.cluster, workers=workers, members=members, say=say) as site,
        ):
            session = Session(
                run_spec.scenario,
                planned,
                site,
                folder.path,
                seed=run_spec.seed,
                duration_s=run_spec.duration_s,
                clock=boot_time_s,
                say=say,
            )
            asyncio.run(session.run())
        account = session.account
        result = replace(
            result,
            injuries=tuple(account.injuries),
            findings=tuple(account.findings),
            restarts=account.restarts,
            broken=account.broken,
            cut_short=account.cut_short,
        )
    except KeyboardInterrupt:  # while the system was starting
        result = replace(result, cut_short=True)
    except (StrataError, OSError) as error:
        result = replace(result, broken=f"the system did not start: {error}")
    lost = any(each.injected and each.planned.fault in faults.LOSSES for each in result.injuries)
    logged = errors_in_logs(folder.cluster / "logs", expected=SUSPENDED if lost else ())
    result = judged(replace(result, findings=(*result.findings, *logged)), folder, run_spec.scenario)
    folder.write_report(report.text(result), report.body(result))
    if not keep and result.exit == 0:
        folder.drop_cluster()
    return result


@contextlib.contextmanager
def _logs_to(path: Path) -> Iterator[None]:
    """Write the logs of Strata's code in this process to a file instead of the terminal while the body runs."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        configure(fmt="json", stream=stream)
        try:
            yield
        finally:
            configure(fmt="auto")


def check(folder: RunFolder) -> Result:
    """Judge the histories of a saved run again; keep the findings that were made during the run."""
    run, scenario, before = folder.run(), folder.scenario(), folder.report()
    result = Result(
        scenario=scenario.name,
        scenario_argument=scenario.scenario_argument,
        seed=run["seed"],
        duration_s=run["duration_s"],
        backend=run["backend"],
        folder=folder.path,
        injuries=tuple(folder.injuries()),
        findings=tuple(
            Finding(checker=f["checker"], message=f["message"], evidence=tuple(f["evidence"]))
            for f in before.get("findings", ())
            if f["checker"] in OBSERVED
        ),
        restarts=before.get("restarts", 0),
        broken=before.get("broken", "" if before else "the run ended before it wrote a report"),
        cut_short=before.get("cut_short", False),
    )
    return judged(result, folder, scenario)


OBSERVED = ("recovery", "processes", COMPLAINTS)
"""Checkers whose findings are made during the run, because the histories do not show them."""


def judged(result: Result, folder: RunFolder, scenario: Scenario) -> Result:
    """Return the result, completed with the findings of checkers and expectations in the histories."""
    verdict = judge(folder.path)
    found = [
        Finding(checker=f"{v.checker}/{v.rule}", message=v.message, evidence=v.evidence)
        for v in verdict.violations
    ]
    found += expectations.judge(folder.path, scenario.expect)
    return replace(
        result,
        findings=(*result.findings, *found),
        uncertainties=verdict.uncertainties,
        operations=by_operation(verdict.operations),
        rules=verdict.coverage,
    )


def by_operation(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Return counts by operation and outcome, for operations of clients only."""
    found: dict[str, dict[str, int]] = {}
    for (op, outcome), count in counts.items():
        if op.partition(".")[0] not in {"fault", "job", "run", "process", "workload"}:
            found.setdefault(op, {})[outcome] = count
    return found


def boot_time_s() -> float:
    """Return CLOCK_BOOTTIME in seconds, which advances while a process is frozen."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
