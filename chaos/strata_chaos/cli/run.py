"""`strata-chaos run`: run a scenario with its faults, and report the verdict."""

from __future__ import annotations

import json
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from strata.cli.console.output import Json
from strata.errors import ConfigError

if TYPE_CHECKING:
    from strata_chaos.judgement.report import Result
    from strata_chaos.run.runner import RunSpec

OUT = Path(".strata/chaos")
LONGEST_S = 1e6
"""Upper limit of `--duration`, more than eleven days: a larger value must be a mistake."""
MOST_SEEDS = 100_000


def run(
    scenario: Annotated[
        str, typer.Option("--scenario", "-s", help="A scenario's name, or the path of a .toml file.")
    ] = "smoke",
    seed: Annotated[int, typer.Option("--seed", help="The seed of all random choices.")] = 1,
    seeds: Annotated[
        str, typer.Option("--seeds", help="Several rounds, one for each seed: 1-20, or 3,5,8.")
    ] = "",
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="As many rounds, with the seeds from --seed on.")
    ] = 1,
    duration: Annotated[
        float, typer.Option("--duration", help="Seconds of faults; 0: the scenario's own.")
    ] = 0.0,
    backend: Annotated[
        str,
        typer.Option("--backend", help="process or netns; by default the scenario's first available one."),
    ] = "",
    out: Annotated[Path, typer.Option("--out", help="The parent of the runs' folders.")] = OUT,
    keep: Annotated[bool, typer.Option("--keep", help="Keep etcd's data and all logs.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the planned faults with their times, and run nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a scenario: start a cluster and clients, inject faults, judge the recorded history.

    Exits with 0: passed, 1: a violation, 2: unknown (a fault of the script had no effect, or the run was
    cut short), 3: the run itself failed. Ctrl-C heals the faults, ends all processes and still reports.

    Example: strata-chaos run --scenario smoke --seed 1 --duration 120
    """
    from strata_chaos import scenario as scenarios  # noqa: PLC0415
    from strata_chaos.judgement import report  # noqa: PLC0415  # as in check
    from strata_chaos.run import rounds as all_rounds  # noqa: PLC0415
    from strata_chaos.run import runner  # noqa: PLC0415  # as in check

    chosen = scenarios.find(scenario)
    duration_s = _duration(duration, chosen.duration_s)
    where = backend or _first_backend(chosen.backends)
    wishes = [
        runner.RunSpec(scenario=chosen, seed=one, duration_s=duration_s, backend=where)
        for one in (_seeds(seeds) if seeds else range(seed, seed + rounds))
    ]
    if plan:
        _print_plans(wishes, as_json=as_json)
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    results = []
    summary = out / f"{chosen.name}-{where}-{seeds or f'{seed}-{seed + rounds - 1}'}"
    for run_spec in wishes:
        results.append(_one(run_spec, out, keep=keep, quiet=as_json))
        if len(wishes) > 1:  # written after each round, because a long series may be interrupted
            summary.with_suffix(".txt").write_text(all_rounds.text(results))
            summary.with_suffix(".json").write_text(json.dumps(all_rounds.body(results), indent=1) + "\n")
        if results[-1].cut_short:
            break
    if len(wishes) == 1:
        (result,) = results
        sys.stdout.write(
            json.dumps(report.body(result), indent=2) + "\n" if as_json else "\n" + report.text(result)
        )
        raise typer.Exit(result.exit)
    text, body = all_rounds.text(results), all_rounds.body(results)
    sys.stdout.write(json.dumps(body, indent=2) + "\n" if as_json else f"\n{text}\nsummary {summary}.txt\n")
    raise typer.Exit(all_rounds.worst(results))


def _one(run_spec: RunSpec, out: Path, *, keep: bool, quiet: bool) -> Result:
    """Run as one wish specifies, in a new folder, and print the progress."""
    from strata_chaos.run import runner  # noqa: PLC0415
    from strata_chaos.run.folder import RunFolder  # noqa: PLC0415

    console = Console(stderr=quiet, highlight=False, emoji=False, soft_wrap=True)
    begin = time.monotonic()

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - begin:7.1f} s  {line}", markup=False)

    run_spec.plan()  # raises for an impossible run before a folder is made
    name = f"{run_spec.scenario.name}-{run_spec.seed}-{run_spec.backend}"
    folder = RunFolder.create(out, name)
    console.print(f"{run_spec.scenario.name}: {run_spec.scenario.title}", markup=False)
    console.print(f"seed {run_spec.seed}, backend {run_spec.backend}, folder {folder.path}", markup=False)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    result = runner.run(run_spec, folder, started=started, say=say, keep=keep)
    say(result.verdict)
    return result


def _first_backend(names: tuple[str, ...]) -> str:
    from strata_chaos import backends  # noqa: PLC0415

    reasons = {name: backends.ALL[name].available() for name in names}
    for name, why_not in reasons.items():
        if not why_not:
            return name
    listing = "; ".join(f"{name}: {why_not}" for name, why_not in reasons.items())
    raise ConfigError(f"none of the scenario's backends is available here: {listing}")


def _duration(requested_s: float, own_s: float) -> float:
    """Return how long faults are injected: `requested_s`, or the scenario's own duration if `requested_s` is 0."""
    if requested_s and not 1 <= requested_s <= LONGEST_S:  # NaN fails this too
        raise ConfigError(
            f"--duration: {requested_s:g} s is not between 1 s and {LONGEST_S:g} s",
            hint=f"the scenario's own duration is {own_s:g} s",
        )
    return requested_s or own_s


def _seeds(text: str) -> list[int]:
    """Return the seeds of `1-20` or `3,5,8`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(
                f"--seeds: {part!r} is not a seed or a span of seeds", hint="write 1-20 or 3,5,8"
            )
        span = range(int(first), int(last or first) + 1)
        if len(span) > MOST_SEEDS:
            raise ConfigError(f"--seeds: {part!r} are more than {MOST_SEEDS:,} seeds", hint="write 1-20")
        found += span
    if not found:
        raise ConfigError(f"--seeds: {text!r} names no seed", hint="write 1-20 or 3,5,8")
    return found


def _print_plans(wishes: list[RunSpec], *, as_json: bool) -> None:
    planned = {run_spec.seed: run_spec.plan() for run_spec in wishes}
    if as_json:
        body = [
            {
                "seed": seed,
                "plan": [
                    {
                        "number": p.number,
                        "at_s": p.at_s,
                        "hold_s": p.hold_s,
                        "fault": p.fault,
                        "choice": p.choice,
                    }
                    for p in plan
                ],
            }
            for seed, plan in planned.items()
        ]
        sys.stdout.write(json.dumps(body, indent=2) + "\n")
        return
    for seed, plan in planned.items():
        sys.stdout.write(f"seed {seed}\n")
        for p in plan:
            sys.stdout.write(f"{p.at_s:7.1f} s  {p.fault}, held {p.hold_s:g} s\n")
