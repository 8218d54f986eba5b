"""The command line as a whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from rich.markup import render

from strata.cli.app import app

COMMANDS = getattr(typer.main.get_command(app), "commands")  # noqa: B009  # click's group, which typer hides
PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_nothing_of_the_help_is_taken_for_markup(name: str) -> None:
    command = COMMANDS[name]
    for text in (command.help, *(parameter.help for parameter in command.params)):
        assert render(text).plain == text


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
