"""All commands of the command line: help, options and imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.markup import render
from typer.testing import CliRunner

from strata.cli import app as command_line
from strata.cli.app import assembled

# typer's type hides the commands of click's group
COMMANDS = getattr(typer.main.get_command(assembled()), "commands")  # noqa: B009
PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_nothing_of_the_help_is_taken_for_markup(name: str) -> None:
    command = COMMANDS[name]
    for text in (command.help, *(parameter.help for parameter in command.params)):
        assert render(text or "").plain == (text or "")  # an older typer's argument without help has None


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_on_the_page(name: str) -> None:
    section = re.search(rf"^## `strata {name}`.*?(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, name
    shared = re.search(r"^## Settings.*?(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shared is not None
    options = {max(p.opts, key=len) for p in COMMANDS[name].params if p.opts[0].startswith("-")}
    assert {option for option in options if f"`{option}`" not in section[0] + shared[0]} == set()


def test_no_option_is_on_the_page_that_does_not_exist() -> None:
    groups = [getattr(command, "commands", {}).values() for command in COMMANDS.values()]
    every = [*COMMANDS.values(), *(command for group in groups for command in group)]
    known = {opt for command in every for p in command.params for opt in (*p.opts, *p.secondary_opts)}
    known |= {"--help", "--version", "--install-completion", "--show-completion"}
    named = set(re.findall(r"`(--[a-z-]+)`", PAGE.read_text()))
    assert named - known == set()


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_a_command_loaded_alone_has_the_same_help(name: str) -> None:
    alone = CliRunner().invoke(assembled(name), [name, "--help"], prog_name="strata")
    assert alone.exit_code == 0
    assert alone.output == CliRunner().invoke(assembled(), [name, "--help"], prog_name="strata").output


def test_a_command_loads_no_other_command() -> None:
    script = (
        "import sys; from strata.cli.app import COMMANDS, assembled; assembled('status');"
        "print([n for n, w in COMMANDS.items() if w.partition(':')[0] in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "['status']"


SERVERS = {"dev", "coordinator", "run"}
PASSED_ON = {"logs"}
"""Commands that print the output of other programs unchanged."""


def every_command() -> dict[str, Any]:
    alone = {name: command for name, command in COMMANDS.items() if not hasattr(command, "commands")}
    groups = {name: command.commands for name, command in COMMANDS.items() if hasattr(command, "commands")}
    return alone | {f"{name} {own}": each for name, group in groups.items() for own, each in group.items()}


@pytest.mark.parametrize("name", sorted(every_command().keys() - SERVERS - PASSED_ON))
def test_every_command_with_output_has_a_json_option(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in every_command()[name].params)
