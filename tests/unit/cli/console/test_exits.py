"""Errors and the exit codes of a command."""

from __future__ import annotations

import pytest

from strata import errors
from strata.cli.console.exits import Exit, exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), Exit.USAGE),
        (errors.InvalidArgument("x"), Exit.USAGE),
        (errors.Unavailable("x"), Exit.UNAVAILABLE),
        (errors.OutcomeUnknown("x"), Exit.UNAVAILABLE),
        (errors.Refused("x"), Exit.REFUSED),
        (errors.Conflict("x"), Exit.REFUSED),
        (errors.StaleIncarnation("x"), Exit.REFUSED),
        (errors.NotFound("x"), Exit.REFUSED),
        (errors.CheckpointNotFound("x"), Exit.REFUSED),
        (errors.JobFailed("x"), Exit.DO_NOT_REQUEUE),
        (errors.ClusterReplaced("x"), Exit.FAILURE),
        (errors.StorageError("x"), Exit.FAILURE),
        (errors.BarrierTimeout("x", missing=("1",)), Exit.FAILURE),
    ],
)
def test_each_kind_of_error_has_its_code(error: errors.StrataError, code: Exit) -> None:
    assert exit_code(error) is code


def test_every_error_ends_a_command_with_something_else_than_0() -> None:
    # only errors that a caller can see: other packages have internal errors, which never reach a command
    public = [cls for cls in errors.by_code().values() if cls.__module__ == errors.__name__]
    assert len(public) > 15
    assert all(exit_code(cls("x")) is not Exit.OK for cls in public)


def test_the_codes_are_those_of_the_documentation() -> None:
    assert [int(code) for code in Exit] == [0, 1, 2, 3, 4, 75, 78]
