"""`strata status`: the coordinators, the leader, etcd's members and the jobs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
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
    printable,
    size,
)
from strata.config import Credentials

if TYPE_CHECKING:
    from strata.v1.admin_pb2 import GetStatusResponse, ReplicaStatus
    from strata.v1.worlds_pb2 import Job

JOB_COLUMNS = ("JOB", "PHASE", "GENERATION", "RANKS", "MEMBERS", "LATEST STEP")
"""The columns of `job_row`."""
_EVERY_S = 2.0
_PLAIN = (None, "", "dumb", "unknown")
_CLEAR = "\x1b[H\x1b[J"
"""Moves the cursor to the top and clears the screen below it; the terminal's scrollback stays."""


@connecting
def status(
    endpoints: Endpoints = DEFAULT_ENDPOINTS,
    as_json: Json = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh every two seconds, until Ctrl-C.")
    ] = False,
    *,
    credentials: Credentials,
) -> None:
    """Show the coordinators, the leader, etcd's members and the jobs.

    Example: strata status --endpoints 127.0.0.1:50051
    """
    from strata.client import CoordinatorClient  # noqa: PLC0415  # grpc only when a command needs it

    with CoordinatorClient.connect(endpoints, timeout_s=timeout_s, credentials=credentials) as client:
        while True:
            answer = client.status()
            jobs = () if as_json else client.jobs()
            if watch and not as_json and sys.stdout.isatty() and os.environ.get("TERM") not in _PLAIN:
                sys.stdout.write(_CLEAR)
            if as_json:
                print_json(answer)
            else:
                show_status(answer, jobs)
            if not watch:
                return
            sys.stdout.flush()
            time.sleep(_EVERY_S)


def show_status(answer: GetStatusResponse, jobs: Sequence[Job]) -> None:
    """Print the coordinators, etcd's members and the jobs, with the faults below each table."""
    if answer.outage:
        sys.stdout.write(f"{printable(answer.outage)}\n\n")
    show_coordinators(answer)
    print_table(
        "",
        ("ETCD", "ROLE", "HEALTHY", "VERSION", "DATA"),
        (
            (
                member.endpoint,
                "leader" if member.leader else "member",
                "yes" if member.healthy else "no",
                member.version or "-",
                size(member.db_size_bytes),
            )
            for member in answer.etcd
        ),
        empty="etcd did not answer",
    )
    for member in answer.etcd:
        if member.error:
            sys.stdout.write(f"{printable(member.endpoint)}: {printable(member.error)}\n")
    print_table(
        "",
        JOB_COLUMNS,
        map(job_row, jobs),
        empty="no job yet: start one with strata run -- python train.py",
    )
    print_findings(jobs)


def show_coordinators(answer: GetStatusResponse) -> None:
    """Print the coordinators, and below them the reasons why some are not ready."""
    print_table(
        f"cluster {answer.cluster}: leader {answer.leader or 'none at the moment'}",
        ("COORDINATOR", "ADDRESS", "ROLE", "READY", "VERSION"),
        (
            (
                replica.replica,
                replica.address or "-",
                "-" if replica.unreachable else "leader" if replica.leader else "follower",
                "yes" if replica.ready else "no",
                replica.version or "-",
            )
            for replica in answer.replicas
        ),
        empty="no coordinator is registered",
    )
    if not all(replica.ready for replica in answer.replicas):
        sys.stdout.write(f"{printable(readiness(answer.replicas))}\n")
    for replica in answer.replicas:
        if replica.unreachable:
            name = printable(replica.replica)
            sys.stdout.write(f"  start it, or remove it: strata coordinators forget {name}\n")


def readiness(replicas: Sequence[ReplicaStatus]) -> str:
    """Return which coordinators are not ready, why, and how many are ready: `c2 unreachable for 14 s; 2 of 3 ready`."""
    parts = [
        f"{each.replica} {each.not_ready_reason}"
        if each.unreachable
        else f"{each.replica}: {each.not_ready_reason or 'not ready'}"
        for each in replicas
        if not each.ready
    ]
    return "; ".join([*parts, f"{sum(each.ready for each in replicas)} of {len(replicas)} ready"])


def print_findings(jobs: Iterable[Job]) -> None:
    """Print why jobs failed, and the findings on jobs' ranks and devices: a line for each failure and diagnosis."""
    from strata.v1.worlds_pb2 import JOB_PHASE_FAILED  # noqa: PLC0415  # grpc only when it is needed

    for job in jobs:
        if job.phase == JOB_PHASE_FAILED:
            sys.stdout.write(f"{job.name}: failed: {printable(job.phase_reason)}\n")
        if job.diagnosis:
            sys.stdout.write(f"{job.name}: {printable(job.diagnosis)}\n")


def job_row(job: Job) -> tuple[object, ...]:
    """Return a job as a row of a table."""
    return (
        job.name,
        phase_name(job),
        job.world.generation or "-",
        job.world.size,
        f"{job.workers} ({len(job.standbys)} standby)" if job.standbys else job.workers,
        job.latest_step if job.has_latest else "-",
    )


def phase_name(job: Job) -> str:
    """Return a job's displayed phase: waiting if a running job has no world, stopping or scaling after a request."""
    from strata.v1.worlds_pb2 import JOB_PHASE_RUNNING, STOP_ACTION_SCALE, JobPhase  # noqa: PLC0415  # as above

    if job.phase == JOB_PHASE_RUNNING and not job.world.size:
        return "waiting"
    if job.phase == JOB_PHASE_RUNNING and job.HasField("notice"):
        return "scaling" if job.notice.action == STOP_ACTION_SCALE else "stopping"
    return enum_name(JobPhase.Name(job.phase), "JobPhase")
