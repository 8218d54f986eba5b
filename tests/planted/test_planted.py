"""Faults planted into one copy of the tree, one after the other: the test that each names must catch it.

A patch begins with three lines, `Fault:`, `Caught-by:` (a test's id) and `Shows-as:` (a regular
expression that the failed test's output must match, so that it failed of the fault and of nothing
else), and goes on as a unified diff. That the test passes without the patch is shown where it stands,
in the ordinary suite. Faults of one test file come one after the other, so that the copy's compiled modules
are those the next one needs. `make test` plants TEN of them, `make test-all` all.
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
"""Times of patched files. Python compares a source's time and size with those of the compiled module, and a clock that
is read twice within its resolution would show a patched file as the one before."""


@contextmanager
def planted(fault: Planted, tree: Path) -> Iterator[None]:
    """Have the fault in the tree; fail with what to do when the patch fits no longer."""
    _apply(fault, tree)
    try:
        yield
    finally:
        _apply(fault, tree, "--reverse")


def _apply(fault: Planted, tree: Path, *options: str) -> None:
    # Git looks for no repository above the copy: it would apply the paths to that one.
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
    """Return a copy of what the named tests need."""
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


def test_the_ten_of_make_test_are_among_them() -> None:
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
        code, said = _tested(fault, tree)
    told = said[-3000:]
    assert code == FAILED, f"{fault.caught_by} does not catch it ({fault.fault}), exit code {code}:\n{told}"
    assert not NO_PROGRAM.search(said), f"{fault.path.name} breaks the program, not a rule:\n{told}"
    assert re.search(fault.shows_as, said), f"it failed, and not as `{fault.shows_as}`:\n{told}"


def _tested(fault: Planted, tree: Path) -> tuple[int, str]:
    """Return the exit code of the named test, and what it printed."""
    log = tree / f"{fault.path.stem}.log"
    child = Child.start(
        [sys.executable, "-m", "pytest", fault.caught_by, "-q", "-x", "-p", "no:cacheprovider"],
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
