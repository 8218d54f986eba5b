"""`strata jobs`: which there are, and one of them in full."""

from __future__ import annotations

from typing import Annotated

import typer

from strata.cli.completion import complete_jobs
from strata.cli.credentials import connecting
from strata.cli.output import (
    DEFAULT_ENDPOINTS,
    DEFAULT_TIMEOUT_S,
    Endpoints,
    Json,
    TimeoutS,
    print_json,
    print_table,
)
from strata.cli.status import job_row, phase_name, print_troubles
from strata.config import Credentials

app = typer.Typer(help="List the jobs of the cluster, or show one.", no_args_is_help=True)


@app.command("list")
@connecting
def list_jobs(
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """List the jobs of the cluster.

    Example: strata jobs list
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(endpoints, timeout_s=timeout_s, credentials=credentials) as client:
        jobs = client.jobs()
    if as_json:
        print_json(jobs)
        return
    print_table(
        f"{len(jobs)} jobs",
        ("JOB", "PHASE", "GENERATION", "RANKS", "WORKERS", "STANDBYS", "LATEST STEP"),
        map(job_row, jobs),
        empty="no job yet: start one with strata run -- python train.py",
    )
    print_troubles(jobs)


@app.command("show")
@connecting
def show_job(
    name: Annotated[str, typer.Argument(help="The job's name.", autocompletion=complete_jobs)],
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Show one job: its phase and why, its limits, its world, what it restores from.

    Example: strata jobs show gpt
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(
        endpoints, job=name, timeout_s=timeout_s, credentials=credentials
    ) as client:
        job = client.job_status()
    if as_json:
        print_json(job)
        return
    world, spec = job.world, job.spec
    restore = f"step {world.restore.step}" if world.HasField("restore") else "-"
    print_table(
        f"job {job.name}: {phase_name(job)}",
        ("FIELD", "VALUE"),
        (
            ("why", job.phase_reason or world.reason or "-"),
            ("trouble", job.trouble or "none is known"),
            ("generation", world.generation or "-"),
            ("ranks", world.size),
            ("members", f"{job.workers} ({len(job.standbys)} standby)"),
            ("needs", f"{spec.min_workers} to {spec.max_workers} members, settles for {spec.settle_s:g} s"),
            ("fails after", f"{spec.max_fruitless_generations} generations without a checkpoint"),
            ("latest step", job.latest_step if job.has_latest else "-"),
            ("began from", restore),
            ("restores", world.restore.path or "-"),
        ),
        empty="",
    )
