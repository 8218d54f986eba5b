"""The command line, assembled from its commands."""

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
    "datasets": "strata.cli.datasets:datasets",
    "jobs": "strata.cli.jobs.control:app",  # which adds its commands to those of `jobs`
    "watch": "strata.cli.watch:watch",
    "controlplane": "strata.cli.controlplane.backup:app",
    "doctor": "strata.cli.doctor:doctor",
    "etcd": "strata.cli.etcd.commands:app",
    "certs": "strata.cli.certs:app",
    "tokens": "strata.cli.tokens:app",
}
"""In the order of the help: where each is, the function or the group of commands."""

# the first word that is no option begins the command, so that `--` may be left out
CONTEXTS: Final[dict[str, dict[str, Any]]] = {"run": {"allow_interspersed_args": False}}


def assembled(only: str = "") -> typer.Typer:
    """Return the command line, with `only` one of its commands or with all.

    A program that runs one command loads no other: a coordinator or a supervisor that is started
    anew is there sooner, and `strata status` takes a third of the time.
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


def _version(wanted: bool) -> None:
    if wanted:
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

    So does an error of the operating system, which is most often about the output: a full disk, a
    reader that went. The exit code holds also when nobody can be told why.
    """
    _stand_in_for_closed()
    try:
        try:
            first = sys.argv[1] if len(sys.argv) > 1 else ""
            assembled(first if first in COMMANDS else "")()
        finally:
            sys.stdout.flush()
    except StrataError as error:
        _tell(error)
        sys.exit(exit_code(error))
    except OSError as error:
        _drop(1)
        if not isinstance(error, BrokenPipeError):
            _tell(StrataError(str(error), hint="the command was cut short"))
        sys.exit(Exit.FAILURE)
    finally:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            _drop(2)


def _stand_in_for_closed() -> None:
    """Give a stream that the shell closed (`2>&-`) somewhere to write: Python has None in its place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _tell(error: StrataError) -> None:
    with contextlib.suppress(OSError, SystemExit):  # by which rich answers a reader that went
        print_error(error)


def _drop(fd: int) -> None:
    """Send what is left unwritten nowhere: it would fail once more when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
