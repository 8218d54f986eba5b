"""The command line, assembled from its commands."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from strata.cli import (
    barriers,
    certs,
    checkpoints,
    coordinator,
    datasets,
    dev,
    doctor,
    job_control,
    members,
    status,
    tokens,
    watch,
)
from strata.cli import run as run_command
from strata.cli.exits import Exit, exit_code
from strata.cli.output import print_error
from strata.errors import StrataError

app = typer.Typer(
    name="strata",
    help="A highly available control plane for distributed model training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"strata {metadata.version('strata-control')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


app.command("dev")(dev.dev)
app.command("coordinator")(coordinator.coordinator)
# the first word that is no option begins the command, so that `--` may be left out
app.command("run", context_settings={"allow_interspersed_args": False})(run_command.run)
app.command("status")(status.status)
app.command("members")(members.members)
app.command("barriers")(barriers.barriers)
app.add_typer(checkpoints.app, name="checkpoints")
app.command("datasets")(datasets.datasets)
app.add_typer(job_control.app, name="jobs")  # which adds its commands to those of `jobs`
app.command("watch")(watch.watch)
app.command("doctor")(doctor.doctor)
app.add_typer(certs.app, name="certs")
app.add_typer(tokens.app, name="tokens")


def run() -> None:
    """Run the command line; a `StrataError` becomes a message, a hint and an exit code.

    So does an error of the operating system, which is most often about the output: a full disk, a
    reader that went.
    """
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except StrataError as error:
        print_error(error)
        sys.exit(exit_code(error))
    except OSError as error:
        # what is left unwritten would fail once more when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print_error(StrataError(str(error), hint="the command was cut short"))
        sys.exit(Exit.FAILURE)
