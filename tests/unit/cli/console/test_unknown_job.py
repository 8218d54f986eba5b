"""The error for a job that does not exist, or for a missing `default`, lists the existing jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.message import Message
from typer.testing import CliRunner

from strata.cli.app import assembled
from strata.errors import NotFound, PermissionDenied
from strata.v1.checkpoints_pb2 import ListCheckpointsRequest
from strata.v1.members_pb2 import ListMembersRequest
from strata.v1.worlds_pb2 import Job, ListJobsRequest, ListJobsResponse
from tests.unit.client.unary_server import UnaryServer, unary_server


@pytest.fixture
def server() -> Iterator[UnaryServer]:
    def refuse(request: ListMembersRequest) -> Message:
        raise NotFound(f"no job {request.job} exists", hint="a job begins with its first member")

    with unary_server() as one:
        one.answers[ListMembersRequest] = one.answers[ListCheckpointsRequest] = refuse
        yield one


def hint(server: UnaryServer, *words: str) -> str:
    done = CliRunner(env={"STRATA_JOB": None}).invoke(assembled(), [*words, "--endpoints", server.address])
    assert isinstance(done.exception, NotFound)
    return done.exception.hint


@pytest.mark.parametrize("command", ["members", "checkpoints list", "members --job typo"])
def test_the_first_five_jobs_are_named(server: UnaryServer, command: str) -> None:
    server.answers[ListJobsRequest] = lambda _: ListJobsResponse(jobs=[Job(name=n) for n in "abcdefg"])
    output = hint(server, *command.split())
    assert output == "a job begins with its first member; --job takes one of these: a, b, c, d, e and 2 more"


def test_an_empty_or_refused_job_list_leaves_the_hint_unchanged(server: UnaryServer) -> None:
    def refuse(_: object) -> Message:
        raise PermissionDenied("not yours")

    server.answers[ListJobsRequest] = lambda _: ListJobsResponse()
    assert hint(server, "members") == "a job begins with its first member"
    server.answers[ListJobsRequest] = refuse
    assert hint(server, "members") == "a job begins with its first member"
