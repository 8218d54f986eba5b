"""A `strata` command in the process of the test, which is quicker than a process of its own."""

from __future__ import annotations

from typer.testing import CliRunner

from strata.cli.app import assembled
from strata.cli.console.exits import exit_code
from strata.errors import StrataError


def outcome_of(command: str, *words: object, answer: str = "", columns: int | None = None) -> tuple[int, str]:
    """Run `strata command words`; return its exit code and its output, with an error's message and hint.

    `answer` is its standard input. An exception that is no error of Strata is raised.
    """
    result = CliRunner(env=None if columns is None else {"COLUMNS": str(columns)}).invoke(
        assembled(command), [command, *map(str, words)], input=answer, prog_name="strata"
    )
    if isinstance(result.exception, StrataError):
        return int(exit_code(result.exception)), f"{result.output}{result.exception}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def run_command(
    command: str, *words: object, code: int = 0, answer: str = "", columns: int | None = None
) -> str:
    """Run the command, which must exit with `code`; return what `outcome_of` returns beside the code."""
    found, output = outcome_of(command, *words, answer=answer, columns=columns)
    assert found == code, output
    return output
