"""docs/where.md and the recipes of CONTRIBUTING.md name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

from strata.core.access.authority import RULES

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_0-9]+\.py)?)`")
CALL = "Checkpoints.PinCheckpoint"
"""A method that was added according to the recipe for an RPC."""


def test_each_file_of_the_page_exists() -> None:
    rows = [row for row in (ROOT / "docs" / "where.md").read_text().splitlines() if row.startswith("| ")]
    named = [name for row in rows for name in NAMED.findall(row)]
    missing = [
        name for name in named if not any((folder / name).exists() for folder in (ROOT / "strata", ROOT))
    ]
    assert len(named) > 60
    assert missing == []


def test_each_package_of_the_recipes_exists() -> None:
    named = NAMED.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) >= 8
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_recipe_for_an_rpc_names_each_file_that_an_rpc_is_in() -> None:
    """The recipe names each file that contains a method's name or its messages, apart from tests and generated code."""
    recipe = next(
        part
        for part in (ROOT / "CONTRIBUTING.md").read_text().split("\n\n")
        if part.startswith("**An RPC.**")
    )
    assert CALL in RULES
    service, method = CALL.split(".")
    found = {
        path.relative_to(ROOT)
        for folder in ("proto", "strata/core", "strata/coordinator", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".proto", ".md"}
        and re.search(rf"{service}\.{method}\b|rpc {method}\(|\b{method}Request\b", path.read_text())
    }
    assert len(found) >= 4
    assert [str(path) for path in found if not _is_named(path, recipe)] == []


def _is_named(path: Path, recipe: str) -> bool:
    """Return True if the recipe names the file, or the folder of a file whose name depends on the service."""
    name = str(path)
    return name in recipe or any(
        name.startswith(part.split("<")[0].split("…")[0])
        for part in re.findall(r"`([^`]+)`", recipe)
        if "/" in part
    )
