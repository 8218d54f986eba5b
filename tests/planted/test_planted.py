"""Faults planted into a copy of the tree: the test that each patch names must catch it.

A patch begins with three lines, `Fault:`, `Caught-by:` (a test's id) and `Shows-as:` (a regular
expression that the failed test's output must match, so that it failed of the fault and of nothing
else), and goes on as a unified diff. That the test passes without the patch is shown where it stands,
in the ordinary suite.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from strata.launch.children import Child
from tests.conftest import ROOT

HERE = Path(__file__).parent
LIMIT_S = 300.0
FAILED = 1
"""pytest's exit code when tests ran and some failed; others say that it could not run them."""
NO_PROGRAM = re.compile(r"\b(SyntaxError|IndentationError|NameError|ImportError|ModuleNotFoundError)\b")
"""In a log: the patched code does not even run. A test that fails of this has caught nothing."""


@dataclass(frozen=True, slots=True)
class Planted:
    """One patch file."""

    path: Path
    fault: str
    caught_by: str
    shows_as: str

    @classmethod
    def read(cls, path: Path) -> Planted:
        head = path.read_text().splitlines()[:3]
        fault, caught_by, shows_as = (line.partition(": ")[2] for line in head)
        assert fault, f"{path.name} begins with `Fault: …`"
        assert caught_by, f"{path.name} has a second line `Caught-by: tests/…::test_…`"
        assert shows_as, f"{path.name} has a third line `Shows-as: …`"
        return cls(path, fault, caught_by, shows_as)


PLANTED = [Planted.read(path) for path in sorted(HERE.glob("*.patch"))]


def plant(fault: Planted, tree: Path) -> None:
    """Apply the patch; fail with what to do when it fits no longer."""
    # Git looks for no repository above the copy: it would apply the paths to that one.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent), "GIT_DIR": os.devnull}
    applied = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(fault.path)],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if applied.returncode:
        pytest.fail(
            f"{fault.path.name} does not apply any more; make it anew for the code as it is:"
            f" {applied.stderr.strip()}",
            pytrace=False,
        )


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """Return a copy of what a test needs."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("strata", "tests", "docs", "proto"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".strata"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    yield copy
    shutil.rmtree(copy)


def test_there_are_the_ten_faults_of_the_protocols() -> None:
    assert len(PLANTED) >= 10


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.path.stem)
def test_the_named_test_catches_the_fault(fault: Planted, tree: Path) -> None:
    plant(fault, tree)
    log = tree / "pytest.log"
    child = Child.start(
        [sys.executable, "-m", "pytest", fault.caught_by, "-q", "-x", "-p", "no:cacheprovider"],
        name=fault.path.stem,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tree,
        log=log,
    )
    try:
        code = child.join(LIMIT_S)
    finally:
        child.stop()
    said = log.read_text()
    told = said[-3000:]
    assert code == FAILED, f"{fault.caught_by} does not catch it ({fault.fault}), exit code {code}:\n{told}"
    assert not NO_PROGRAM.search(said), f"{fault.path.name} breaks the program, not a rule:\n{told}"
    assert re.search(fault.shows_as, said), f"it failed, and not as `{fault.shows_as}`:\n{told}"
