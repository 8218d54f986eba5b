"""The extra packages of a coordinator, compared with its imports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from strata.cli.console import extras
from strata.errors import ConfigError
from tests.conftest import ROOT

BASE = {"google", "grpc", "msgspec", "rich", "strata", "structlog", "typer", "xxhash"}
LEFT_OUT = {"cryptography", "uvloop"}
"""cryptography, which only `strata certs` requires; and uvloop, which is optional for a coordinator."""


def imported(folder: Path) -> set[str]:
    """Return the packages imported by files below `folder`."""
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names)


def test_every_package_a_coordinator_imports_is_in_the_base_or_the_server_extra() -> None:
    needed = imported(ROOT / "strata" / "coordinator") | imported(ROOT / "strata" / "dashboard")
    assert needed - BASE - LEFT_OUT == set(extras.SERVER_MODULES)


def test_one_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    extras.check_server()
    monkeypatch.setattr(extras, "SERVER_MODULES", ("grpc_health", "no_such_package"))
    with pytest.raises(
        ConfigError, match="a coordinator needs no_such_package: not installed here"
    ) as caught:
        extras.check_server()
    assert caught.value.hint == 'pip install "strata-control[server]"'
