"""The command line, assembled from its commands; conversion of errors to messages and exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer

import strata
from strata.cli.console.exits import Exit, exit_code
from strata.cli.console.output import print_error
from strata.errors import StrataError

COMMANDS: Final = {
    "dev": "strata.cli.dev:dev",
    "coordinator": "strata.cli.coordinator:coordinator",
    "run": "strata.cli.run:run",
    "logs": "strata.cli.logs:logs",
    "status": "strata.cli.status:status",
    "coordinators": "strata.cli.coordinators:app",
    "top": "strata.cli.top.command:top",
    "members": "strata.cli.members:members",
    "barriers": "strata.cli.barriers:barriers",
    "checkpoints": "strata.cli.checkpoints:app",
    "verify-run": "strata.cli.verify_run:verify_run",
    "datasets": "strata.cli.datasets:datasets",
    "jobs": "strata.cli.jobs.control:app",  # imports the app of `jobs` and adds commands to it
    "watch": "strata.cli.watch:watch",
    "controlplane": "strata.cli.controlplane.backup:app",
    "doctor": "strata.cli.doctor:doctor",
    "etcd": "strata.cli.etcd.commands:app",
    "certs": "strata.cli.certs:app",
    "tokens": "strata.cli.tokens:app",
}
"""The function or group of each command, in the order of the help."""

# The first word that is not an option begins the ranks' command, so `--` may be omitted.
CONTEXTS: Final[dict[str, dict[str, Any]]] = {"run": {"allow_interspersed_args": False}}


def assembled(only: str = "") -> typer.Typer:
    """Return the command line with all commands, or with the command `only`.

    A process that runs one command imports no other command: an agent or coordinator restarts sooner, and `strata
    status` takes a third of the time.
    """
    app = typer.Typer(
        name="strata",
        help="A highly available control plane for distributed model training.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, where in COMMANDS.items():
        if only in {name, ""}:
            module, _, attribute = where.partition(":")
            found = getattr(import_module(module), attribute)
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=name)
            else:
                app.command(name, context_settings=CONTEXTS.get(name))(found)
    return app


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"strata {strata.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def run() -> None:
    """Run the command line; a `StrataError` becomes a message, a hint and an exit code.

    An `OSError` is reported in the same way: its usual cause is the output, for example a full disk or a closed pipe.
    If the message cannot be written, the exit code is still the same.
    """
    _stand_in_for_closed()
    try:
        try:
            first = sys.argv[1] if len(sys.argv) > 1 else ""
            assembled(first if first in COMMANDS else "")()
        finally:
            sys.stdout.flush()
    except StrataError as error:
        _report(error)
        sys.exit(exit_code(error))
    except OSError as error:
        _drop(1)
        if not isinstance(error, BrokenPipeError):
            _report(StrataError(str(error), hint="the command was cut short"))
        sys.exit(Exit.FAILURE)
    finally:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            _drop(2)


def _stand_in_for_closed() -> None:
    """Open /dev/null in place of a standard stream that the shell closed (`2>&-`); Python has None for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _report(error: StrataError) -> None:
    with contextlib.suppress(OSError, SystemExit):  # rich raises SystemExit if the reader closed the pipe
        print_error(error)


def _drop(fd: int) -> None:
    """Redirect a stream to /dev/null: at exit, flushing its unwritten data would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
