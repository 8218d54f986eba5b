"""`strata jobs scale | pause | resume | preempt | drain | delete`: an operator's requests to a job.

Each command returns once the request is recorded; with `--wait`, once the request is carried out. Ctrl-C ends the
wait, not the request.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from strata.cli.console.output import (
    DEFAULT_ENDPOINTS,
    DEFAULT_TIMEOUT_S,
    Endpoints,
    Json,
    TimeoutS,
    print_json,
    print_values,
    printable,
)
from strata.cli.jobs import listing
from strata.cli.jobs.named_job import Name, on_job
from strata.cli.status import phase_name
from strata.config import Credentials
from strata.errors import JobFailed, Refused

if TYPE_CHECKING:
    from strata.client import CoordinatorClient
    from strata.v1.worlds_pb2 import Job, StopNotice

app = listing.app

POLL_S: Final = 0.5

Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done; shows the progress on stderr.")]
Reason = Annotated[str, typer.Option("--reason", help="The reason, for logs, status and history.")]
GraceS = Annotated[
    float,
    typer.Option(
        "--grace-s",
        min=0.001,
        max=86_400,
        help="Seconds that the save may take. A save that would take longer is skipped.",
    ),
]
Now = Annotated[bool, typer.Option("--now", help="At once: without a common step, and without a save.")]
DEFAULT_GRACE_S: Final = 60.0


@app.command("scale")
@on_job
def scale(
    name: Name,
    min_workers: Annotated[
        int, typer.Option("--min-workers", min=0, help="Members it needs; 0: as it is.")
    ] = 0,
    max_workers: Annotated[
        int, typer.Option("--max-workers", min=0, help="Members it takes at most; 0: as it is.")
    ] = 0,
    wait: Wait = False,
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Change how many members a job needs and takes. Its world grows or shrinks by itself.

    Example: strata jobs scale --job gpt --min-workers 2 --max-workers 6
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    if not min_workers and not max_workers:
        raise typer.BadParameter("pass --min-workers, --max-workers, or both")
    with CoordinatorClient.connect(
        endpoints, job=name, timeout_s=timeout_s, credentials=credentials
    ) as client:
        job = client.scale(min_workers=min_workers, max_workers=max_workers)
        if wait:
            job = _follow(client, _fits)
    if as_json:
        print_json(job)
        return
    _say(f"{name} takes {job.spec.min_workers} to {job.spec.max_workers} members; {_state(job)}")


def _fits(job: Job) -> bool:
    """Return whether the world is as large as the limits and the present members allow."""
    return job.world.members == min(job.workers, job.spec.max_workers) or job.workers < job.spec.min_workers


@app.command("pause")
@on_job
def pause(
    name: Name,
    reason: Reason = "",
    grace_s: GraceS = DEFAULT_GRACE_S,
    now: Now = False,
    wait: Wait = False,
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Have all ranks save and stop. The members stay, and wait until the job is resumed.

    Example: strata jobs pause --job gpt --reason "the file server moves" --wait
    """
    _stop("pause", name, (), reason, grace_s, now, wait, endpoints, as_json, timeout_s, credentials)


@app.command("preempt")
@on_job
def preempt(
    name: Name,
    reason: Reason = "",
    grace_s: GraceS = DEFAULT_GRACE_S,
    now: Now = False,
    wait: Wait = False,
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Have all ranks save one common step and end; every strata run of the job then exits with code 75.

    Example: strata jobs preempt --job gpt --grace-s 120
    """
    _stop("preempt", name, (), reason, grace_s, now, wait, endpoints, as_json, timeout_s, credentials)


@app.command("drain")
@on_job
def drain(
    name: Name,
    workers: Annotated[
        list[str],
        typer.Argument(
            metavar="WORKER", help="The members to leave, by worker id. Without --job the first is the job."
        ),
    ],
    reason: Reason = "",
    grace_s: GraceS = DEFAULT_GRACE_S,
    now: Now = False,
    wait: Wait = False,
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Have all ranks save; then some members leave with exit code 75, and the others go on without them.

    Example: strata jobs drain node-3 --job gpt --reason "its fan is broken"
    """
    named = tuple(workers)
    _stop("drain", name, named, reason, grace_s, now, wait, endpoints, as_json, timeout_s, credentials)


@app.command("resume")
@on_job
def resume(
    name: Name,
    wait: Wait = False,
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Let a paused job train again, from its latest checkpoint.

    Example: strata jobs resume --job gpt
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(
        endpoints, job=name, timeout_s=timeout_s, credentials=credentials
    ) as client:
        job = client.resume()
        if wait:
            job = _follow(client, lambda job: job.world.members > 0)
    if as_json:
        print_json(job)
        return
    _say(f"{name} is resumed; {_state(job)}")


@app.command("delete")
@on_job
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    *,
    credentials: Credentials,
) -> None:
    """Forget a job without members: its history, its catalog, its datasets. Files of checkpoints stay.

    Example: strata jobs delete --job gpt
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(
        endpoints, job=name, timeout_s=timeout_s, credentials=credentials
    ) as client:
        job = client.job_status()
        if not yes:
            latest = f", whose latest checkpoint is of step {job.latest_step}" if job.has_latest else ""
            typer.confirm(f"Forget job {name}{latest}? Its checkpoints' files stay.", abort=True, err=True)
        client.delete()
    if as_json:
        print_values({"job": name, "deleted": True})
        return
    _say(f"{name} is forgotten")


def _stop(
    action: str,
    name: str,
    workers: tuple[str, ...],
    reason: str,
    grace_s: float,
    now: bool,
    wait: bool,
    endpoints: str,
    as_json: bool,
    timeout_s: float,
    credentials: Credentials,
) -> None:
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it
    from strata.v1.worlds_pb2 import StopJobResponse  # noqa: PLC0415  # as above

    with CoordinatorClient.connect(
        endpoints, job=name, timeout_s=timeout_s, credentials=credentials
    ) as client:
        notice = client.stop(
            action, worker_ids=workers, reason=reason or f"{action} by operator", grace_s=grace_s, now=now
        )
        if wait:
            ended = notice.generation if notice is not None else 0
            _follow(client, lambda job: _has_stopped(job, action, ended))
    if as_json:
        print_json(StopJobResponse(notice=notice))
        return
    _say(_outcome_text(name, action, notice, wait))


def _has_stopped(job: Job, action: str, generation: int) -> bool:
    from strata.v1.worlds_pb2 import JOB_PHASE_PAUSED  # noqa: PLC0415  # grpc only when a command needs it

    if action == "pause":
        return job.phase == JOB_PHASE_PAUSED and not job.world.members
    return job.world.generation > generation or not generation


def _outcome_text(name: str, action: str, notice: StopNotice | None, waited: bool) -> str:
    from strata.v1.worlds_pb2 import StopAction  # noqa: PLC0415  # grpc only when a command needs it

    if notice is None:
        return (
            f"{name} is paused" if action == "pause" else f"no rank of {name} runs: there is nothing to stop"
        )
    held = StopAction.Name(notice.action).removeprefix("STOP_ACTION_").lower()
    if action == "pause" and notice.pause:
        paused = "is paused" if waited else "is paused when that is done"
        return f"generation {notice.generation} of {name} is requested to {held} as well: {notice.reason}; {name} {paused}"
    if held != action:
        return f"generation {notice.generation} of {name} already has a request to {held}: {notice.reason}"
    if waited:
        return f"generation {notice.generation} of {name} has stopped"
    within = f"within {notice.grace_ms / 1000:g} s" if notice.grace_ms else "at once, without a save"
    return f"generation {notice.generation} of {name} is requested to stop {within}"


# -- waiting ----------------------------------------------------------------------------------


def _follow(client: CoordinatorClient, met: Callable[[Job], bool]) -> Job:
    """Return the job once `met` is true; until then print the job's changes on stderr.

    Raise `JobFailed` if the job fails instead, or `Refused` if the job is done.
    """
    from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED  # noqa: PLC0415  # as above

    reported = ""
    while True:
        job = client.job_status()
        if met(job):
            return job
        if job.phase == JOB_PHASE_FAILED:
            raise JobFailed(f"job {job.name} has failed: {job.phase_reason}")
        if job.phase == JOB_PHASE_DONE:
            raise Refused(f"job {job.name} is done: {job.phase_reason}")
        if (state := _state(job)) != reported:
            reported = state
            sys.stderr.write(f"waiting: {printable(state)}\n")
            sys.stderr.flush()
        time.sleep(POLL_S)


def _state(job: Job) -> str:
    """Return a job's state as text."""
    world = job.world
    if job.HasField("notice"):
        return f"generation {world.generation} is requested to stop: {job.notice.reason}"
    if not world.members:
        why = job.phase_reason or world.reason
        here = f"{job.workers} of at least {job.spec.min_workers} members are here"
        return f"{phase_name(job)}, {here}" + (f" ({why})" if why else "")
    return f"generation {world.generation} has {world.members} of {job.workers} members"


def _say(sentence: str) -> None:
    sys.stdout.write(printable(sentence) + "\n")
