"""Every command that README and CONTRIBUTING show exists, and every command is documented."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from strata.cli.app import assembled

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "operate").glob("*.md")),
]
BLOCK = re.compile(r"^```(?:sh|console|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def typed_commands(page: Path) -> list[list[str]]:
    """The command lines of a page's shell blocks. If a block shows output, its command lines are those after a `$`."""
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
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_readme_shows_the_demo_and_test_commands() -> None:
    typed = [words for page, words in ALL_COMMANDS if page == "README.md"]
    assert ["make", "demo"] in typed
    assert ["make", "test"] in typed


@pytest.mark.parametrize(("page", "words"), [c for c in ALL_COMMANDS if c[1][0] == "make"])
def test_make_targets_exist(page: str, words: list[str]) -> None:
    targets = [word for word in words[1:] if "=" not in word]
    assert set(targets) <= make_targets(), page


def test_scripts_exist() -> None:
    programs = {words[0] for _page, words in ALL_COMMANDS if "/" in words[0]}
    missing = [p for p in programs if not p.startswith(".venv/") and not (ROOT / p).exists()]
    assert missing == []


def cli_commands() -> dict[str, str]:
    """The help of every `strata` command by name; a command in a group is named `group command`."""
    found: dict[str, str] = {}

    def visit(prefix: str, group: object) -> None:
        for name, command in getattr(group, "commands", {}).items():
            if command.hidden:
                continue
            found[f"{prefix}{name}"] = command.help or ""
            visit(f"{prefix}{name} ", command)

    visit("", typer.main.get_command(assembled()))
    return found


COMMANDS = cli_commands()
GROUPS = {command.rpartition(" ")[0] for command in COMMANDS} - {""}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_and_is_documented(command: str) -> None:
    assert COMMANDS[command].strip(), f"strata {command} has no help"
    pages = "\n".join(page.read_text() for page in PAGES)
    assert re.search(rf"\bstrata {re.escape(command)}\b", pages), f"no page mentions `strata {command}`"


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - GROUPS))
def test_every_command_has_an_example_in_its_help_and_on_a_page(command: str) -> None:
    assert f"Example: strata {command}" in COMMANDS[command]
    typed = [words for page, words in ALL_COMMANDS if page != "README.md" and words[0] == "strata"]
    assert any(words[1 : 1 + command.count(" ") + 1] == command.split() for words in typed), (
        f"no page shows how `strata {command}` is typed"
    )


@pytest.mark.parametrize(("page", "words"), [c for c in ALL_COMMANDS if c[1][0] == "strata"])
def test_documented_commands_exist(page: str, words: list[str]) -> None:
    assert len(words) > 1, page
    named = " ".join(words[1:3]) if words[1] in GROUPS else words[1]
    assert named in COMMANDS or words[1].startswith("-"), page
