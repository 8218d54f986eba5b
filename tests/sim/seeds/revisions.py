"""The commit of a run, and whether a seed also fails on the commit before it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from strata.processes.children import Child
from tests.sim.seeds.batch import HASH_SEED

ROOT = Path(__file__).resolve().parents[3]
RUNS = ("strata", "tests/sim")
"""The paths that a seed's run depends on. The ledger is not among them: a long run may write it."""
SEED_S = 300.0
"""Time limit for one seed, which takes seconds."""
HELD, FAILED = 0, 1


def head(root: Path = ROOT) -> str:
    """Return the commit, or `""` outside a repository; it ends in `-dirty` if `RUNS` differ from it."""
    commit = _git(root, "rev-parse", "HEAD")
    return commit + "-dirty" if commit and _git(root, "status", "--porcelain", "--", *RUNS) else commit


def short(commit: str) -> str:
    """Return a commit in its short form."""
    name, dash, dirty = commit.partition("-")
    return f"{name[:8]}{dash}{dirty}" if commit else "no commit"


def parent(commit: str, root: Path = ROOT) -> str:
    """Return the commit before this change: HEAD if there are uncommitted changes, otherwise HEAD's parent, or `""`."""
    name, _, dirty = commit.partition("-")
    return name if dirty else _git(root, "rev-parse", "--verify", "--quiet", f"{name}^")


def holds_on(commit: str, seed: int, root: Path = ROOT) -> bool:
    """Return whether a seed passes with the code and the judge of that commit.

    Raises `RuntimeError` as `holds` does.
    """
    with tempfile.TemporaryDirectory(prefix="parent-") as folder:
        packed = subprocess.run(
            ["git", "archive", commit, "--", *RUNS, "pyproject.toml"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return holds(Path(folder), seed)


def holds(tree: Path, seed: int) -> bool:
    """Return whether a seed passes in a tree; raise `RuntimeError` if it could not run in the tree."""
    with tempfile.TemporaryDirectory(prefix="seed-") as folder:
        log = Path(folder) / "log"
        child = Child.start(
            [sys.executable, "-m", "tests.sim", "--seed", str(seed)],
            name=f"seed {seed}",
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": HASH_SEED},
            cwd=tree,
            log=log,
        )
        try:
            code = child.join(SEED_S)
        finally:
            child.stop()
        output = log.read_text()
    if code not in {HELD, FAILED} or '"violations"' not in output:
        raise RuntimeError(f"seed {seed} could not be run in {tree}: {output[-2000:]}")
    return code == HELD


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
