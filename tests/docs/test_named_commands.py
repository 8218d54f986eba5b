"""Every command in a page, a help text or a message must exist, with the options that follow its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from strata.cli.app import assembled

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = [
    *ROOT.glob("*.md"),
    *(page for folder in ("docs", "deploy", "examples", "chaos") for page in (ROOT / folder).rglob("*.md")),
]
SOURCES: Final = [*(ROOT / "strata").rglob("*.py"), *(ROOT / "chaos").rglob("*.py")]
NAMED: Final = re.compile(
    r"(?<!from )(?<!import )\bstrata (?P<words>[a-z][a-z-]*(?: [a-z][a-z-]*)?)(?P<rest>(?:(?!\bstrata )[^`\n;|()])*)"
)
"""A mention of a command, and the rest of its line: its arguments, or more words of prose."""
OPTION: Final = re.compile(r"(?<=\s)--[a-z][a-z-]*")


def options_by_command() -> dict[str, set[str]]:
    """Every command of `strata` and every group, with its options."""
    found: dict[str, set[str]] = {}

    def visit(name: str, command: Any) -> None:
        found[name] = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        for own, each in getattr(command, "commands", {}).items():
            visit(f"{name} {own}".strip(), each)

    visit("", typer.main.get_command(assembled()))
    return found


OPTIONS: Final = options_by_command()
GROUPS: Final = {name.rpartition(" ")[0] for name in OPTIONS} - {""}


def wrong(text: str) -> Iterator[str]:
    """Yield each mention of a command, or of a command's option, that does not exist."""
    for mention in NAMED.finditer(text):
        first, *more = mention["words"].split()
        name = f"{first} {more[0]}" if more and first in GROUPS else first
        if name not in OPTIONS:
            yield f"strata {name}"
            continue
        own, _, _program = mention["rest"].partition(" -- ")
        known = OPTIONS[name] | {"--help"}
        yield from (f"strata {name} {option}" for option in OPTION.findall(own) if option not in known)


def texts(source: str) -> Iterator[str]:
    """Yield the literal texts of a program, including docstrings and f-strings.

    Each replacement field of an f-string counts as one word.
    """
    inner: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_that_a_page_names_exist(page: Path) -> None:
    assert list(wrong(page.read_text())) == []


def test_the_commands_that_messages_and_help_name_exist() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {mention}"
        for file in SOURCES
        for text in texts(file.read_text())
        for mention in wrong(text)
    ]
    assert found == []


def test_the_check_reports_wrong_commands() -> None:
    assert list(wrong("`strata checkpoints ref 5`, or strata reference")) == [
        "strata checkpoints ref",
        "strata reference",
    ]
    assert list(wrong("by strata jobs scale gpt --max 2, or `strata top --once`")) == [
        "strata jobs scale --max"
    ]
    assert list(wrong("strata run --job a -- python train.py --epochs 3; from strata import init")) == []
    assert list(texts('raise E(f"no {job}", hint=f"strata job {job} --new")')) == [
        "no X",
        "strata job X --new",
    ]
