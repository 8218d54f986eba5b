"""`strata run`: the agent of one node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from strata.cli.console.credentials import Insecure, TlsCaFile, TlsCertFile, TlsKeyFile, TokenFile
from strata.config import RunConfig


def run(
    command: Annotated[
        list[str], typer.Argument(help="The command of each rank: -- python train.py --epochs 3")
    ],
    endpoints: Annotated[
        str | None,
        typer.Option("--endpoints", "-e", help="Coordinators, as host:port, by commas."),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option("--job", "-j", help="The job to join. (on a single node: named from the script)"),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", help="The run of this node; a node that comes late to it ends with 0."),
    ] = None,
    worker_id: Annotated[
        str | None, typer.Option("--worker-id", help="This member's name. (the host's)")
    ] = None,
    slots: Annotated[int | None, typer.Option("--slots", help="Ranks to run on this node. [1]")] = None,
    min_workers: Annotated[
        int | None, typer.Option("--min-workers", help="Members the job needs to train. [1]")
    ] = None,
    max_workers: Annotated[
        int | None,
        typer.Option("--max-workers", help="Members it takes at most. (as many as it needs)"),
    ] = None,
    settle_s: Annotated[
        float | None,
        typer.Option("--settle-s", help="Seconds to wait for more than it needs. [2]"),
    ] = None,
    max_no_progress_generations: Annotated[
        int | None,
        typer.Option(
            "--max-no-progress-generations",
            help="Generations in a row without a checkpoint that fail the job. [3]",
        ),
    ] = None,
    max_generations: Annotated[
        int | None,
        typer.Option("--max-generations", help="Generations that may fail until the job does. (no limit)"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Where other nodes reach this one. (found by the route)"),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            help="A folder for the ranks' output, a file each; strata logs reads them. (they are shown here)",
        ),
    ] = None,
    tee: Annotated[
        bool | None,
        typer.Option("--tee", help="With --log-dir: show the ranks' output here as well."),
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option(
            "--prefix/--no-prefix",
            help="Show ranks' lines with the rank before each; or ranks write here by themselves. (prefix)",
        ),
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout-s", help="Seconds to wait for a first coordinator; 0: for ever. [300]"),
    ] = None,
    stop_grace_s: Annotated[
        float | None,
        typer.Option("--stop-grace-s", help="Seconds from SIGTERM to SIGKILL at the end. [30]"),
    ] = None,
    restart_grace_s: Annotated[
        float | None,
        typer.Option(
            "--restart-grace-s", help="Seconds from SIGTERM to SIGKILL when a generation has ended. [2]"
        ),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            "--restart", help="For a new generation: a new process, or in_process where ranks can. (process)"
        ),
    ] = None,
    warm: Annotated[
        bool | None,
        typer.Option("--warm/--no-warm", help="Keep one process per slot that has done the imports. (yes)"),
    ] = None,
    warm_import: Annotated[
        str | None,
        typer.Option("--warm-import", help="Modules for it besides those found in the script, by commas."),
    ] = None,
    preempt: Annotated[
        str | None,
        typer.Option("--preempt", help="Members that leave with a preempted one: job (all) or member. (job)"),
    ] = None,
    preempt_grace_s: Annotated[
        float | None,
        typer.Option(
            "--preempt-grace-s", help="Seconds for a common last step and its save when preempted. [25]"
        ),
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option("--resume", help="Go on with a job that is done, has failed or ran another program."),
    ] = None,
    new: Annotated[
        bool | None,
        typer.Option(
            "--new",
            help="Begin a job that is done, has failed or ran another command from nothing; its checkpoints stay.",
        ),
    ] = None,
    on_stall: Annotated[
        str | None,
        typer.Option("--on-stall", help="What to do with ranks that stand still: report or evict. (report)"),
    ] = None,
    stall_factor: Annotated[
        float | None,
        typer.Option("--stall-factor", help="How many times its usual time a step may take. [10]"),
    ] = None,
    stall_limits: Annotated[
        str | None,
        typer.Option("--stall-limits", help="Limits of single phases: step=60,eval=900 (in seconds)."),
    ] = None,
    devices: Annotated[
        bool | None,
        typer.Option("--devices/--no-devices", help="Watch this node's NVIDIA devices. (it does)"),
    ] = None,
    status_line: Annotated[
        bool | None,
        typer.Option(
            "--status-line/--no-status-line", help="Progress in the terminal's last line. (if there is one)"
        ),
    ] = None,
    ca_file: TlsCaFile = None,
    cert_file: TlsCertFile = None,
    key_file: TlsKeyFile = None,
    token_file: TokenFile = None,
    insecure: Insecure = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", help="plain, json, or auto: json on a pipe. (plain)")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file.")] = None,
) -> None:
    """Join a job, run its ranks on this node, and start them again when the world changes.

    Start one on each node. The exit status is 0 when the job is done (or was, for a late node of the same run),
    3 when no coordinator answered within --timeout-s, 4 when the job's name belongs to another run or command,
    75 when this node was preempted and shall be requeued, 78 when the job has failed for good, and 128 + n when
    signal n stopped it.

    Example: strata run --job gpt --slots 8 --min-workers 2 -- python train.py
    """
    from strata.launch.run import run as run_node  # noqa: PLC0415  # grpc only when it is needed

    flags = {
        "endpoints": endpoints,
        "job": job,
        "run_id": run_id,
        "worker_id": worker_id,
        "slots": slots,
        "min_workers": min_workers,
        "max_workers": max_workers,
        "settle_s": settle_s,
        "max_no_progress_generations": max_no_progress_generations,
        "address": address,
        "log_dir": log_dir,
        "tee": tee,
        "prefix": prefix,
        "timeout_s": timeout_s,
        "stop_grace_s": stop_grace_s,
        "max_generations": max_generations,
        "restart_grace_s": restart_grace_s,
        "restart": restart,
        "warm": warm,
        "warm_imports": warm_import,
        "preempt": preempt,
        "preempt_grace_s": preempt_grace_s,
        "resume": resume,
        "new": new,
        "status_line": status_line,
        "health.on_stall": on_stall,
        "health.stall_factor": stall_factor,
        "health.stall_limits": stall_limits,
        "health.devices": devices,
        "credentials.ca_file": ca_file,
        "credentials.cert_file": cert_file,
        "credentials.key_file": key_file,
        "credentials.token_file": token_file,
        "credentials.insecure": insecure,
        "log.format": log_format,
    }
    settings = RunConfig.load(flags=flags, env=os.environ, path=config)
    raise typer.Exit(run_node(settings, command))
