"""Faults planted into one copy of the tree, one after another. Each fault names a test, which must catch the fault.

A patch begins with three lines: `Fault:`, `Caught-by:` (a test's id) and `Shows-as:` (a regular expression). The
failed test's output must match the expression, which proves that this fault caused the failure. A unified diff
follows. The ordinary suite shows that the test passes without the patch. The faults of one test file run one after
another, so that each run can reuse the copy's compiled modules. `make test` plants the faults in TEN, `make test-all`
plants all.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from strata.processes.children import Child
from tests.conftest import ROOT

HERE = Path(__file__).parent
LIMIT_S = 300.0
FAILED = 1
"""pytest's exit code if tests ran and some failed; other codes mean that pytest could not run the tests."""
NO_PROGRAM = re.compile(r"\b(SyntaxError|IndentationError|NameError|ImportError|ModuleNotFoundError)\b")
"""Errors in a log if the patched code does not even run. A test that fails with such an error has caught nothing."""


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


TEN = {
    "arrivals-not-forwarded-again",
    "base-not-compared",
    "etcd-watch-resumed-one-late",
    "fence-removed",
    "last-copy-goes",
    "member-deleted-by-name",
    "notice-not-compared",
    "one-host-condemns",
    "stale-refusal",
    "world-not-compared",
}
"""One of each kind: fence, watch, barrier, membership, stop, catalog, retention, corruption, executor, world."""
PLANTED = sorted(map(Planted.read, HERE.glob("*.patch")), key=lambda fault: (fault.caught_by, fault.path))

_moment_s = itertools.count(1_000_000_000)
"""Modification times of patched files. Python compares a source's time and size with those recorded in the compiled
module. Two real times within the clock's resolution would be equal, and Python would use the code before the patch.
"""


@contextmanager
def planted(fault: Planted, tree: Path) -> Iterator[None]:
    """Apply the fault to the tree for the body; if the patch does not apply, fail with instructions."""
    _apply(fault, tree)
    try:
        yield
    finally:
        _apply(fault, tree, "--reverse")


def _apply(fault: Planted, tree: Path, *options: str) -> None:
    # Stop Git from finding a repository above the copy: it would apply the paths to that one.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent), "GIT_DIR": os.devnull}

    def git_apply(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "apply", "--whitespace=nowarn", *options, *words, str(fault.path)]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)

    changed = git_apply("--numstat")
    applied = git_apply()
    if changed.returncode or applied.returncode:
        pytest.fail(
            f"{fault.path.name} does not apply any more; make it anew for the code as it is:"
            f" {(applied.stderr or changed.stderr).strip()}",
            pytrace=False,
        )
    for line in changed.stdout.splitlines():
        moment_s = next(_moment_s)
        os.utime(tree / line.split("\t")[2], (moment_s, moment_s))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a copy of the parts of the tree that the named tests need."""
    copy = tmp_path_factory.mktemp("planted") / "tree"
    copy.mkdir()
    for name in ("strata", "tests", "docs", "proto"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".strata"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    before = {path: path.read_bytes() for path in (copy / "strata").rglob("*.py")}
    yield copy
    for path, content in before.items():
        assert path.read_bytes() == content, "a patch was not taken back"
    shutil.rmtree(copy)


def test_the_ten_faults_of_make_test_are_planted_faults() -> None:
    assert {fault.path.stem for fault in PLANTED} >= TEN
    assert len(TEN) == 10


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.path.stem, marks=() if fault.path.stem in TEN else pytest.mark.slow)
        for fault in PLANTED
    ],
)
def test_the_named_test_catches_the_fault(fault: Planted, tree: Path) -> None:
    with planted(fault, tree):
        code, output = _tested(fault, tree)
    tail = output[-3000:]
    assert code == FAILED, f"{fault.caught_by} does not catch it ({fault.fault}), exit code {code}:\n{tail}"
    assert not NO_PROGRAM.search(output), f"{fault.path.name} breaks the program, not a rule:\n{tail}"
    assert re.search(fault.shows_as, output), f"it failed, and not as `{fault.shows_as}`:\n{tail}"


def _tested(fault: Planted, tree: Path) -> tuple[int, str]:
    """Return the exit code and the output of the named test."""
    log = tree / f"{fault.path.stem}.log"
    child = Child.start(
        [sys.executable, "-m", "pytest", fault.caught_by, "-vv", "-x", "-p", "no:cacheprovider"],
        name=fault.path.stem,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(tree)},
        cwd=tree,
        log=log,
    )
    try:
        code = child.join(LIMIT_S)
    finally:
        child.stop()
    return code, log.read_text()
