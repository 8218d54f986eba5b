"""`strata jobs` takes its job from `--job` or its argument, and all commands name their options consistently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from typer.testing import CliRunner

from strata.cli.app import assembled
from strata.errors import InvalidArgument, NotFound
from strata.v1.worlds_pb2 import (
    DeleteJobRequest,
    DeleteJobResponse,
    GetJobRequest,
    GetJobResponse,
    Job,
    ListGenerationsRequest,
    ListGenerationsResponse,
    ListJobsRequest,
    ListJobsResponse,
    ResumeJobRequest,
    ResumeJobResponse,
    ScaleJobRequest,
    ScaleJobResponse,
    StopJobRequest,
    StopJobResponse,
)
from tests.unit.cli.test_app import every_command
from tests.unit.client.unary_server import UnaryServer, unary_server

ASKS = {
    "show": GetJobRequest,
    "history": ListGenerationsRequest,
    "scale --max-workers 2": ScaleJobRequest,
    "pause": StopJobRequest,
    "resume": ResumeJobRequest,
    "preempt": StopJobRequest,
    "delete --yes": DeleteJobRequest,
}
"""The request about its job that each command sends to the coordinators."""


@pytest.fixture
def server() -> Iterator[UnaryServer]:
    with unary_server() as one:
        one.answers[GetJobRequest] = lambda request: GetJobResponse(job=Job(name=request.job))
        one.answers[ScaleJobRequest] = lambda request: ScaleJobResponse(job=Job(name=request.job))
        one.answers[ResumeJobRequest] = lambda request: ResumeJobResponse(job=Job(name=request.job))
        one.answers[ListGenerationsRequest] = lambda _: ListGenerationsResponse()
        one.answers[StopJobRequest] = lambda _: StopJobResponse()
        one.answers[DeleteJobRequest] = lambda _: DeleteJobResponse()
        yield one


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without a strata.toml


def done(server: UnaryServer, *words: str, job: str | None = None) -> Any:
    return CliRunner(env={"STRATA_JOB": job, "COLUMNS": "80"}).invoke(
        assembled(), ["jobs", *words, "--endpoints", server.address]
    )


@pytest.mark.parametrize("command", ASKS)
@pytest.mark.parametrize("how", ["--job gpt", "-j gpt", "gpt", "gpt --job gpt"])
def test_the_job_option_and_the_job_argument_are_equivalent(
    server: UnaryServer, command: str, how: str
) -> None:
    it = done(server, *command.split(), *how.split(), job="another")
    assert it.exit_code == 0, it.output
    assert {request.job for request in server.requested_paths(ASKS[command])} == {"gpt"}


@pytest.mark.parametrize("command", ASKS)
def test_two_jobs_are_refused_and_both_are_named(server: UnaryServer, command: str) -> None:
    it = done(server, *command.split(), "gpt", "--job", "bert")
    assert isinstance(it.exception, InvalidArgument), "which ends a command with 2"
    assert it.exception.message == "the argument names the job gpt, and --job names bert"
    assert not server.requests


@pytest.mark.parametrize("command", ASKS)
def test_the_job_comes_from_the_environment_or_the_file_and_is_otherwise_required(
    server: UnaryServer, command: str
) -> None:
    assert done(server, *command.split(), job="gpt").exit_code == 0
    Path("strata.toml").write_text('job = "of-the-file"\n')
    assert done(server, *command.split()).exit_code == 0
    jobs = {request.job for request in server.requested_paths(ASKS[command])}
    assert jobs == {"gpt", "of-the-file"}
    Path("strata.toml").unlink()
    before = len(server.requests)
    it = done(server, *command.split())
    assert isinstance(it.exception, InvalidArgument)
    assert it.exception.message == "no job is named"
    assert len(server.requests) == before, "in particular not about `default`"


@pytest.mark.parametrize("how", ["gpt a b", "a b --job gpt", "--job gpt a b"])
def test_a_drain_names_its_job_in_either_way(server: UnaryServer, how: str) -> None:
    it = done(server, "drain", *how.split(), job="another")
    assert it.exit_code == 0, it.output
    (request,) = server.requested_paths(StopJobRequest)
    assert (request.job, list(request.worker_ids)) == ("gpt", ["a", "b"])


def test_a_drain_without_a_worker_shows_its_usage(server: UnaryServer) -> None:
    it = done(server, "drain", "node-3", job="gpt")
    assert isinstance(it.exception, InvalidArgument)
    assert it.exception.message == "no worker is named, only node-3"
    assert it.exception.hint == "name the job and the members: JOB WORKER, or WORKER --job JOB"
    assert not server.requests


@pytest.mark.parametrize("how", ["typo", "--job typo"])
def test_an_unknown_job_is_answered_with_the_known_ones(server: UnaryServer, how: str) -> None:
    def refuse(request: GetJobRequest) -> Message:
        raise NotFound(f"no job {request.job} exists", hint="a job begins with its first member")

    server.answers[GetJobRequest] = refuse
    server.answers[ListJobsRequest] = lambda _: ListJobsResponse(jobs=[Job(name="gpt")])
    it = done(server, "show", *how.split())
    assert isinstance(it.exception, NotFound)
    assert it.exception.hint == "a job begins with its first member; --job takes one of these: gpt"


# -- the same option names in all commands

NO_JOB = {
    "coordinator", "dev", "status", "doctor", "jobs list", "checkpoints import",
    *(name for name in every_command() if name.split()[0] in {"etcd", "controlplane", "coordinators"}),
    "certs ca", "certs renew", "certs show", "tokens list", "tokens revoke",
}  # fmt: skip
"""Commands that concern no job, or all jobs."""


def options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("name", sorted(every_command().keys() - NO_JOB))
def test_every_command_about_a_job_takes_it_by_the_same_option(name: str) -> None:
    assert "--job" in options(every_command()[name])


def test_no_command_with_a_job_option_is_missing_from_these_tests() -> None:
    assert every_command().keys() >= NO_JOB
    assert not [name for name in NO_JOB if "--job" in options(every_command()[name])]


def test_the_number_of_members_has_one_name_everywhere() -> None:
    limits = {
        option
        for command in every_command().values()
        for option in options(command)
        if option.startswith(("--min", "--max")) and "generations" not in option
    }
    assert limits == {"--min-workers", "--max-workers"}
