"""`strata jobs list | show | history`: all jobs, one in full, and its generations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.console.credentials import connecting
from strata.cli.console.output import (
    DEFAULT_ENDPOINTS,
    DEFAULT_TIMEOUT_S,
    Endpoints,
    Json,
    TimeoutS,
    enum_name,
    print_json,
    print_table,
)
from strata.cli.jobs.named_job import Name, on_job
from strata.cli.status import JOB_COLUMNS, job_row, phase_name, print_findings
from strata.config import Credentials

if TYPE_CHECKING:
    from strata.v1.checkpoints_pb2 import Checkpoint
    from strata.v1.datasets_pb2 import SampleCursor
    from strata.v1.worlds_pb2 import JobSpec, StopNotice

app = typer.Typer(help="List the jobs of the cluster, show one, and control it.", no_args_is_help=True)


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
        JOB_COLUMNS,
        map(job_row, jobs),
        empty="no job yet: start one with strata run -- python train.py",
    )
    print_findings(jobs)


@app.command("show")
@on_job
def show_job(
    name: Name,
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Show one job: its phase and why, its limits, its world, the checkpoint it restores.

    Example: strata jobs show --job gpt
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(
        endpoints, job=name, timeout_s=timeout_s, credentials=credentials
    ) as client:
        job = client.job_status()
        goodput = "" if as_json or not job.has_latest else _goodput(client.latest_checkpoint())
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
            ("diagnosis", job.diagnosis or "none is known"),
            ("generation", world.generation or "-"),
            ("ranks", world.size),
            ("members", f"{job.workers} ({len(job.standbys)} standby)" if job.standbys else job.workers),
            ("needs", f"{spec.min_workers} to {spec.max_workers} members, settles for {spec.settle_s:g} s"),
            ("fails after", _limits(spec)),
            *([("stop request", _notice(job.notice))] if job.HasField("notice") else []),
            ("latest step", job.latest_step if job.has_latest else "-"),
            *([("goodput", f"{goodput}, up to that step")] if goodput else []),
            *((f"data {each.dataset}", _used(each)) for each in job.cursors),
            ("began from", restore),
            ("restores", world.restore.path or "-"),
        ),
        empty="",
    )


def _goodput(latest: Checkpoint) -> str:
    from strata.core.health.goodput import GOODPUT_KEY, goodput_text  # noqa: PLC0415  # as above

    return goodput_text(latest.metadata.get(GOODPUT_KEY, ""))


def _used(cursor: SampleCursor) -> str:
    """Return how far a dataset was used at the latest step."""
    of = f" of {cursor.length}" if cursor.length else ""
    return f"epoch {cursor.epoch}, {cursor.samples}{of} samples"


def _limits(spec: JobSpec) -> str:
    no_progress = f"{spec.max_no_progress_generations} generations in a row without a checkpoint"
    return f"{no_progress}, or {spec.max_generations} that failed" if spec.max_generations else no_progress


def _notice(notice: StopNotice) -> str:
    from strata.v1.worlds_pb2 import StopAction  # noqa: PLC0415  # grpc only when a command needs it

    action = enum_name(StopAction.Name(notice.action), "StopAction")
    who = f" of {', '.join(notice.worker_ids)}" if notice.worker_ids else ""
    then = ", then pause" if notice.pause else ""
    return f"{action}{who}{then}: {notice.reason}"


@app.command("history")
@on_job
def history(
    name: Name,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="How many; 0: all that are kept.")] = 20,
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Show why each generation of a job began, the newest first.

    Example: strata jobs history --job gpt
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(
        endpoints, job=name, timeout_s=timeout_s, credentials=credentials
    ) as client:
        generations = client.generations(limit=limit)
    if as_json:
        print_json(generations)
        return
    print_table(
        f"job {name}",
        ("GENERATION", "BEGAN (UTC)", "MEMBERS", "RANKS", "FROM STEP", "COMMITTED", "WHY"),
        (
            (
                generation.world.generation,
                time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(generation.began_unix_ms / 1000)),
                generation.world.members or "forming",
                generation.world.size or "-",
                generation.world.restore.step if generation.world.HasField("restore") else "-",
                generation.committed_step if generation.has_committed else "-",
                generation.world.reason,
            )
            for generation in generations
        ),
        empty="it has had no generation yet",
    )
