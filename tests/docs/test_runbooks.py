"""Each runbook has its four headings, commands that parse, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from strata.cli.app import assembled
from tests.docs.test_commands import typed_commands
from tests.docs.test_links import LINK

ROOT = Path(__file__).resolve().parents[2]
OPERATE = ROOT / "docs" / "operate"
INDEX = OPERATE / "README.md"
PROCEDURES = {"README.md", "backup.md"}
"""Pages that are read before anything fails."""
PAGES = sorted(OPERATE.glob("*.md"))
RUNBOOKS = [page for page in PAGES if page.name not in PROCEDURES]
HEADINGS = ("Symptom.", "See.", "Mend.", "Exercised by")


def in_order(text: str) -> list[str]:
    """Return the known headings of a page, in the page's order."""
    return [found for found in re.findall(r"^\*\*([^*]+)\*\*", text, re.MULTILINE) if found in HEADINGS]


def named_tests(text: str) -> list[tuple[str, str]]:
    """Return each file named under the last heading with each of its tests, or with "" for a scenario."""
    found, file = [], ""
    for word in re.findall(r"`([^`]+)`", text.partition("**Exercised by**")[2]):
        path, _, test = word.partition("::")
        if path.endswith((".py", ".toml")):
            file = path
            test = test if path.endswith(".py") else ""
            if test or path.endswith(".toml"):
                found.append((file, test))
        elif word.startswith("test_"):
            found.append((file, word))
    return found


def parse(words: list[str]) -> None:
    """Parse a command line without running it; raise typer's error if it is wrong."""
    command: Any = typer.main.get_command(assembled())
    rest = list(words[1:])
    while hasattr(command, "commands"):
        name = rest.pop(0)
        assert name in command.commands, f"there is no {name!r} in {' '.join(words)}"
        command = command.commands[name]
    command.make_context(words[0], rest)


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.name)
def test_a_runbook_has_its_four_headings(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# Runbook: ")
    assert in_order(text) == list(HEADINGS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_runbook_parse(page: Path) -> None:
    typed = [words for words in typed_commands(page) if words[0] == "strata"]
    assert typed
    for words in typed:
        parse(words)


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.name)
def test_the_tests_that_a_runbook_names_exist(page: Path) -> None:
    found = named_tests(page.read_text())
    assert any(test for _file, test in found), "no test is named"
    for file, test in found:
        assert (ROOT / file).is_file(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_the_index_names_every_page() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall(INDEX.read_text())}
    assert {page.name for page in PAGES} - {"README.md"} <= linked


def test_the_checks_reject_a_wrong_option_and_find_the_named_tests() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["strata", "jobs", "pause", "gpt", "--immediately"])
    assert named_tests(
        "**Exercised by** `tests/a.py`: `test_b`, `chaos/c.toml` and `tests/d.py::test_e`."
    ) == [
        ("tests/a.py", "test_b"),
        ("chaos/c.toml", ""),
        ("tests/d.py", "test_e"),
    ]
