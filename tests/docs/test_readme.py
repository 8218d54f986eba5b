"""The README explains its terms at their first use, and its table of extras agrees with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.test_dependencies import names
from tests.docs.test_links import prose

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
OWN = re.compile(r"strata-control\[([^\]…]+)\]")


@pytest.mark.parametrize("word", ["generation", "world", "member"])
def test_a_word_of_strata_is_explained_at_its_first_use(word: str) -> None:
    text = re.sub(r"etcd('s)? members?", "", prose(README))
    first = re.search(rf"\*?\b{word}s?\b\*?", text)
    assert first is not None
    assert first[0] == f"*{word}*", f"{word} is used before it is explained"


def rows() -> dict[str, str]:
    """The content of each extra, by the README's table."""
    table = re.search(
        r"^\| extra \| brings \| for \|\n\|[-|]+\|\n((?:\|.*\n)+)", README.read_text(), re.MULTILINE
    )
    assert table is not None
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[1].splitlines()]
    return {extra.strip("`"): brings for extra, brings, _for in cells}


def test_the_table_has_every_extra_and_no_other() -> None:
    assert list(rows()) == ["none", *EXTRAS]


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_the_table_lists_the_packages_of_each_extra(extra: str) -> None:
    others = {name for each in EXTRAS[extra] for own in OWN.findall(each) for name in own.split(",")}
    brings = rows()[extra]
    assert set(re.findall(r"`([a-z0-9]+)`", brings)) >= others
    packages = names([each for each in EXTRAS[extra] if not OWN.search(each)])
    if extra != "dev":  # the many packages of `dev` are only for users with a clone
        assert set(re.findall(r"[\w-]+", brings)) == packages | others


def test_every_extra_that_a_page_or_a_message_names_exists() -> None:
    files = [
        README,
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
        *(ROOT / "strata").rglob("*.py"),
    ]
    named = {
        (file.name, extra)
        for file in files
        for own in OWN.findall(file.read_text())
        for extra in own.split(",")
    }
    assert len(named) > 5
    assert {(file, extra) for file, extra in named if extra not in EXTRAS} == set()
