"""What README and CONTRIBUTING tell a person to type exists, and every command is documented."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|console|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def typed_commands(page: Path) -> list[list[str]]:
    """The command lines of a page's shell blocks; where a block shows output, those after a `$`."""
    commands = []
    for block in BLOCK.findall(page.read_text()):
        joined = block.replace("\\\n", " ")
        lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        for line in prompted or lines:
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            commands.append(words)
    return commands


ALL_COMMANDS = [(page.name, words) for page in PAGES for words in typed_commands(page)]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_readme_tells_what_to_type() -> None:
    typed = [words for page, words in ALL_COMMANDS if page == "README.md"]
    assert ["make", "demo"] in typed
    assert ["make", "test"] in typed


@pytest.mark.parametrize(("page", "words"), [c for c in ALL_COMMANDS if c[1][0] == "make"])
def test_make_targets_exist(page: str, words: list[str]) -> None:
    targets = [word for word in words[1:] if "=" not in word]
    assert set(targets) <= make_targets(), page


@pytest.mark.parametrize(("page", "words"), [c for c in ALL_COMMANDS if "/" in c[1][0]])
def test_scripts_exist(page: str, words: list[str]) -> None:
    program = words[0]
    assert program.startswith(".venv/") or (ROOT / program).exists(), page


def cli_commands() -> dict[str, str]:
    """Every command of `strata`, with its help; empty while the command line is not whole yet."""
    try:
        app = importlib.import_module("strata.cli.app").app
    except ImportError as error:
        if not (error.name or "").startswith("strata"):
            raise
        return {}
    found: dict[str, str] = {}

    def visit(prefix: str, group: object) -> None:
        for name, command in getattr(group, "commands", {}).items():
            if command.hidden:
                continue
            found[f"{prefix}{name}"] = command.help or ""
            visit(f"{prefix}{name} ", command)

    visit("", typer.main.get_command(app))
    return found


COMMANDS = cli_commands()


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_and_is_documented(command: str) -> None:
    assert COMMANDS[command].strip(), f"strata {command} has no help"
    pages = "\n".join(page.read_text() for page in PAGES)
    assert re.search(rf"\bstrata {re.escape(command)}\b", pages), f"no page mentions `strata {command}`"


@pytest.mark.parametrize(("page", "words"), [c for c in ALL_COMMANDS if c[1][0] == "strata" and COMMANDS])
def test_documented_commands_exist(page: str, words: list[str]) -> None:
    assert len(words) > 1, page
    assert words[1] in COMMANDS or words[1].startswith("-"), page
