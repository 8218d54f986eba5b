"""The typer application of `strata-chaos`, with its commands."""

from __future__ import annotations

import sys

import typer

from strata.cli.console.output import print_error
from strata.errors import StrataError
from strata_chaos.cli import check, listing
from strata_chaos.cli import run as run_command
from strata_chaos.exits import Exit

app = typer.Typer(
    name="strata-chaos",
    help="Injects faults into a running Strata, and judges from the recorded history which promises held.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run_command.run)
app.command("list")(listing.list_)
app.command("check")(check.check)


def run() -> None:
    """Run the command line; an error becomes a message with a hint, and exit code 3."""
    try:
        app()
    except StrataError as error:
        print_error(error)
        sys.exit(Exit.INFRASTRUCTURE)
    except OSError as error:
        print_error(StrataError(str(error), hint="the command was cut short"))
        sys.exit(Exit.INFRASTRUCTURE)
