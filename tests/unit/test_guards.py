"""`tests/guards.tsv` lists guards (tests that protect a rule).

Each row must name an existing patch or function, or an existing successor.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

LIST = ROOT / "tests" / "guards.tsv"
PLANTED = ROOT / "tests" / "planted"
KINDS = {"planted", "model", "simulation", "schedule", "crash"}
SUBJECTS = {"requests", "corruption", "liveness", "stop"}
ROWS = 582
"""The number of rows, which only grows. Do not delete a guard: name its successor instead."""
OTHERS = {
    "abandoned-chunks-adopted": "how a world is written",
    "aborted-acks-stay": "what a save leaves behind",
    "etcd-watch-resumed-one-late": "the etcd client",
    "fence-removed": "leadership",
    "fork-is-given-up": "the history of a fork",
    "keepalive-answer-trusted": "leadership",
    "watch-resumed-one-late": "a replica's view",
}
"""Planted faults whose subject is not one of `SUBJECTS`, with that subject."""


@dataclass(frozen=True, slots=True)
class Guard:
    """One row of the list; `successors` is empty until another guard replaces this one."""

    id: str
    kind: str
    subject: str
    where: str
    catches: str
    successors: tuple[str, ...]

    @classmethod
    def read(cls, line: str) -> Guard:
        guard, kind, subject, where, catches, successor = line.split("\t")
        return cls(guard, kind, subject, where, catches, () if successor == "-" else tuple(successor.split()))


GUARDS = [Guard.read(line) for line in LIST.read_text().splitlines() if not line.startswith("#")]


@cache
def names(path: Path) -> frozenset[str]:
    """Return the names of a file's top-level functions and classes, and its methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (
                each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
            )
            found |= {f"{node.name}.{method.name}" for method in methods}
    return frozenset(found)


def is_there(where: str, root: Path = ROOT) -> bool:
    """Return whether `path.patch` or `path.py::name` exists; a test's name may end with the id of one case."""
    path, _, name = where.partition("::")
    if not (root / path).is_file():
        return False
    return path.endswith(".patch") if not name else name.partition("[")[0] in names(root / path)


def test_every_row_is_whole() -> None:
    assert {id_ for id_, count in Counter(guard.id for guard in GUARDS).items() if count > 1} == set()
    wrong = [
        guard
        for guard in GUARDS
        if guard.kind not in KINDS or guard.subject not in SUBJECTS or not guard.catches.endswith(".")
    ]
    assert wrong == []
    assert {guard.kind for guard in GUARDS} == KINDS
    assert {guard.subject for guard in GUARDS} == SUBJECTS


def test_every_guard_or_a_successor_exists() -> None:
    missing = [
        f"{guard.id}: {guard.where} is gone; name what catches this now: {guard.catches}"
        for guard in GUARDS
        if not guard.successors and not is_there(guard.where)
    ]
    assert missing == []
    wrong = [
        f"{guard.id}: its successor {successor} is not there"
        for guard in GUARDS
        for successor in guard.successors
        if not is_there(successor)
    ]
    assert wrong == []


def test_no_row_is_deleted() -> None:
    assert len(GUARDS) == ROWS


def test_every_planted_fault_is_listed_as_a_guard_or_exempt() -> None:
    listed = {
        where for guard in GUARDS for where in (guard.where, *guard.successors) if where.endswith(".patch")
    }
    planted = {path.relative_to(ROOT).as_posix() for path in PLANTED.glob("*.patch")}
    others = {f"tests/planted/{name}.patch" for name in OTHERS}
    assert listed & others == set()
    assert planted - listed == others


def test_the_test_that_a_planted_fault_names_is_there() -> None:
    wrong = []
    for path in PLANTED.glob("*.patch"):
        named = path.read_text().splitlines()[1].removeprefix("Caught-by: ")
        if not is_there(named):
            wrong.append(f"{path.name}: {named}")
    assert wrong == []


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("a.py::test_one", True),
        ("a.py::test_one[case]", True),
        ("a.py::Two.three", True),
        ("a.py::three", False),
        ("a.py::test_four", False),
        ("b.py::test_one", False),
        ("a.py", False),
        ("c.patch", True),
        ("d.patch", False),
    ],
)
def test_a_missing_guard_is_detected(where: str, found: bool, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def test_one(): ...\nclass Two:\n    async def three(self): ...\n")
    (tmp_path / "c.patch").touch()
    assert is_there(where, tmp_path) is found
